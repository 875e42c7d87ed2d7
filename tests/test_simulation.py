"""Simulated ranks: the shorter way of plain operations gives what torch's own mode gives, operation by operation."""

import pytest
import torch

from fmegatron import simulation
from fmegatron.mesh import make_mesh
from fmegatron.simulation import is_local, lift, per_rank, simulate, simulating

OPERATIONS = {
    "arithmetic": lambda x, y: x * 2 + y.sum(-1, keepdim=True),
    "views": lambda x, y: x.view(2, 6)[1:].transpose(0, 1) + y.unbind(0)[1][0],
    "lists": lambda x, y: torch.cat([x, y, x]).split([1, 2, 6]),
    "several results": lambda x, y: (*torch.sort(x + y), *torch.topk(y, 2)),
    "in place": lambda x, y: x.clone().add_(y).masked_fill_(y > 0, 3.0)[:, 1:].mul_(2),
    "lists in place": lambda x, y: _foreach(x, y),
    "written outputs": lambda x, y: torch.add(x, y, out=torch.empty_like(x)),
    "factories": lambda x, y: x + torch.arange(4.0) + torch.zeros(3, 1) + torch.ones_like(y),
    "indices": lambda x, y: x.index_select(0, torch.tensor([2, 0])) + y[torch.tensor([0, 1]), :],
    "sizes": lambda x, y: x.new_zeros(x.shape[0], y.numel()).reshape(-1, 2)[: x.dim()] + x.sum(),
    "random numbers": lambda x, y: torch.manual_seed(3) and torch.nn.functional.dropout(x, 0.5) + torch.rand(3, 4),
    "complex": lambda x, y: torch.view_as_real(torch.complex(x, y).detach().conj().resolve_conj()),
    "einsum": lambda x, y: torch.einsum("ab,cb->ac", x, y),
}


def _foreach(x, y):
    leaves = [x.clone(), y.clone()]
    torch._foreach_mul_(leaves, 0.5)
    torch._fused_adamw_(
        leaves, [y, x], [x * 0, y * 0], [x * 0, y * 0], [], [torch.ones(()), torch.ones(())],
        lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    return leaves


def on_ranks(f):
    """f's results with a tensor of each rank, and its gradient: [rank][result]."""
    with simulate(3):
        place = make_mesh("dp=3", device="cpu").position(("dp",))
        x, y = lift(torch.arange(12.0).view(3, 4), 3) - 5 * place, lift(torch.ones(3, 4), 3) * (place - 1)
        x.requires_grad_(), y.requires_grad_()
        outs = f(x, y)
        outs = list(outs) if isinstance(outs, (tuple, list)) else [outs]
        needed = [o for o in outs if o.requires_grad]
        grads = torch.autograd.grad([(o**2).sum() for o in needed], (x, y), allow_unused=True) if needed else ()
        found = [o.detach() for o in outs] + [g for g in grads if g is not None]
        assert all(is_local(o) for o in found)
        return [list(t) for t in zip(*(per_rank(o) for o in found), strict=True)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_shorter_way_gives_the_same(name, monkeypatch):
    import torch.distributed._local_tensor as private

    grad = torch.no_grad() if name in ("lists in place", "written outputs") else torch.enable_grad()
    with grad:
        ours = on_ranks(OPERATIONS[name])
        monkeypatch.setattr(simulation, "_mode", lambda: private.LocalTensorMode)
        assert simulation._mode() is private.LocalTensorMode
        theirs = on_ranks(OPERATIONS[name])
    assert len(ours) == 3 and name == "random numbers" or not torch.equal(ours[0][0], ours[2][0])
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


def test_plain_operations_take_the_shorter_way(monkeypatch):
    """Of a few hundred operations torch's mode sees none."""
    import torch.distributed._local_tensor as private

    with simulate(3):
        x = lift(torch.randn(4, 4), 3).requires_grad_()
        monkeypatch.setattr(private.LocalTensorMode, "__torch_dispatch__", None)
        for _ in range(10):
            y = torch.cat([x.view(16)[:8], (x @ x.t()).softmax(-1).flatten()])
            (grad,) = torch.autograd.grad(y.sum(), x)
        assert grad.shape == (4, 4)


def test_views_share_a_storage_and_nothing_has_a_pointer():
    with simulate(2):
        assert simulating()
        x = lift(torch.randn(4, 3), 2)
        place = x.untyped_storage()._cdata
        for view in (x.view(3, 4), x.detach(), x[1:], *x.unbind(0), *x.split(2), x.t(), x.unsqueeze(0).expand(5, 4, 3)):
            assert view.untyped_storage()._cdata == place
        for new in (x + 1, x.clone(), x.contiguous() * 1):
            assert new.untyped_storage()._cdata != place
        version = x._version
        x.view(3, 4).add_(1)
        assert x._version == version + 1
        with pytest.raises(RuntimeError):
            (x + 1).data_ptr()
    assert not simulating()


def test_parts_of_unequal_size():
    """Sizes that differ by rank go torch's way."""
    from torch.distributed._local_tensor import LocalTensor

    with simulate(2):
        x = LocalTensor({0: torch.arange(4.0), 1: torch.arange(3.0)})
        y = torch.cat([x * 2, x[:1]])
        assert [t.tolist() for t in per_rank(y)] == [[0, 2, 4, 6, 0], [0, 2, 4, 0]]
        assert [len(t) for t in per_rank(x.reshape(-1, 1).squeeze(1))] == [4, 3]
