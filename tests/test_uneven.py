"""Dims and batches whose sizes do not divide by the ranks."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as torch_part

from fmegatron import uneven
from fmegatron.errors import ShardingError, UserError
from fmegatron.mesh import make_mesh
from fmegatron.padding import divisible_size, held_positions, overwritten, shard_batch
from fmegatron.primitives import cross_entropy, linear_cross_entropy, rms_norm
from fmegatron.primitives.cross_entropy import _LinearStatistics
from fmegatron.random import key
from fmegatron.rules import Rules, standard_rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import Param, abstract, init
from fmegatron.testing import Layout, compare
from fmegatron.testing.models import small_model

SIZES = (1, 2, 5, 6, 7, 9, 11, 37)
COUNTS = ((2,), (4,), (2, 2), (3, 2), (2, 4))


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_parts_are_those_of_dtensor(counts):
    for n in SIZES:
        places = list(itertools.product(*map(range, counts)))
        theirs = [torch_part((n,), counts, list(place), [Shard(0)] * len(counts)) for place in places]
        ours = uneven.parts(n, counts)
        assert [size for _, size in ours] == [shape[0] for shape, _ in theirs]
        assert all(start == offset[0] for (start, size), (_, offset) in zip(ours, theirs, strict=True) if size)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_laid_out_and_whole_are_inverse_and_transposed(counts):
    for n in SIZES:
        x = torch.randn(3, n, 2, dtype=torch.float64, requires_grad=True)
        y = uneven.lay_out(x, 1, counts)
        assert torch.equal(uneven.whole(y, 1, n, counts), x)
        positions = uneven.positions(n, counts, torch.device("cpu"))
        assert y.shape[1] == positions.numel()
        assert not y[:, positions.flatten() < 0].any()
        assert torch.equal(y[:, positions.flatten() >= 0], x)
        g = torch.randn_like(y)
        assert torch.equal(torch.autograd.grad(y, x, g)[0], uneven.whole(g, 1, n, counts))


# Each of the layouts has something that no other has: nested axes, empty parts, sharded state, fused loss, tied tables.
LAYOUTS = {
    "nested axes, an empty part": ("llama", {"vocab": 37, "mlp": 5, "heads": 8, "kv_heads": 2}, "tp=8 sp"),
    "tied": ("llama", {"vocab": 37, "mlp": 13, "tied": True}, "tp=2,dp=2 zero=1 micro=2 odd"),
    "zero 2": ("llama", {"vocab": 37, "mlp": 13}, "dp=2,tp=2 zero=2 odd"),
    "zero 3": ("llama", {"vocab": 37, "mlp": 13, "dropout": 0.2}, "dp=2,tp=3 sp zero=3 odd mask=row"),
    "ring": ("llama", {"vocab": 37, "dropout": 0.2}, "cp=2,tp=2 sp context=ring packed odd micro=2"),
    "soft-cap, windows": ("gemma2", {"vocab": 37, "mlp": 13}, "tp=2,cp=2 sp odd"),
    "a rank without a row": ("llama", {"vocab": 36}, "dp=4 odd zero=3"),
    "biases, a layer norm": ("gpt2", {"vocab": 37, "mlp": 13}, "fsdp=2,tp=3 zero=3 remat=nothing odd"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_equal_to_one_device(case):
    name, changes, layout = LAYOUTS[case]
    result = compare(small_model(name, **changes), Layout.parse(layout), checks=("init", "gradients", "adamw"))
    assert result.ok, str(result)


def test_what_fills_up_is_in_no_sum_product_or_maximum():
    """Activations whose filling is not zero: a sigmoid of zero is a half."""
    n = 5
    x = torch.randn(3, n, dtype=torch.float64)
    w = torch.randn(n, 2, dtype=torch.float64)
    with simulate(4):
        mesh = make_mesh("tp=4")
        sh = Sharding(mesh, Rules(compute={"row": None, "out": None, "mlp": "tp", "mlp'": None}, uneven={"mlp": n}))
        part = sh.shard(x, "row mlp").sigmoid()
        assert {p.shape[1] for p in per_rank(part)} == {2}
        total = sh.sum(part, "row mlp -> row")
        most = sh.max(part - 2, "row mlp -> row")
        product = sh.dot(part, sh.shard(w, "mlp out").cos(), "row mlp, mlp out -> row out")
        gathered = sh(part, "row mlp -> row mlp'")
        for value, expected in (
            (total, x.sigmoid().sum(1)),
            (most, x.sigmoid().amax(1) - 2),
            (product, x.sigmoid() @ w.cos()),
            (gathered, x.sigmoid()),
        ):
            for rank in per_rank(value):
                torch.testing.assert_close(rank, expected, rtol=0, atol=1e-14)


NORMS = {
    "an empty part": ({"mlp": 5}, "tp=4", {"mlp": "tp"}, {}),
    "nested axes": ({"mlp": 7}, "a=2,b=2", {"mlp": ("a", "b")}, {}),
    "two dims": ({"mlp": 5, "out": 3}, "a=2,b=2", {"mlp": "a", "out": "b"}, {"zero_centred": True}),
}


@pytest.mark.parametrize("case", NORMS)
def test_a_norm_over_an_uneven_dim(case):
    """Against torch's of the whole, with filling that is not zero: values, gradients, and those of their square."""
    sizes, axes, rows, options = NORMS[case]
    torch.manual_seed(0)
    shape, names = tuple(sizes.values()), " ".join(sizes)
    x, weight = torch.randn(3, *shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    g = torch.randn_like(x)

    def derivatives(x, weight, g, norm):
        leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
        y = norm(leaves[0].sigmoid(), leaves[1])
        first = torch.autograd.grad(y, leaves, g, create_graph=True)
        return [t.detach() for t in (y, *first, *torch.autograd.grad(first[0].square().sum(), leaves))]

    one = 1 if options else 0
    want = derivatives(x, weight, g, lambda x, w: torch.nn.functional.rms_norm(x, shape, one + w, 1e-6))
    with simulate(4):
        sh = Sharding(make_mesh(axes), Rules({"row": None, **rows}, uneven=sizes))
        dims = f"row {names}"
        back = sh.shard(g, dims) + 0.5 * (sh.shard(torch.ones_like(g), dims) == 0)  # what reaches the filling is lost
        got = derivatives(
            sh.shard(x, dims), sh.shard(weight, names), back, lambda x, w: rms_norm(x, w, dims=dims, sh=sh, **options)
        )
        for mine, whole in zip(got, want, strict=True):
            for part, expected in zip(
                per_rank(mine), per_rank(sh.shard(whole, names if whole.ndim < x.ndim else dims)), strict=True
            ):
                torch.testing.assert_close(part, expected, rtol=0, atol=1e-12)


FORMS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "all": {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 2.0},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fused", [True, False], ids=["linear", "logits"])
def test_loss_over_an_uneven_vocabulary(form, fused):
    """Values and gradients are those of the whole vocabulary, also where one rank's part is empty."""
    torch.manual_seed(0)
    vocab, embed = 9, 4  # over 8 ranks in parts of 2: the last three have none
    w = torch.randn(vocab, embed, dtype=torch.float64)
    x = torch.randn(2, 3, embed, dtype=torch.float64)
    labels = torch.randint(0, vocab, (2, 3))
    g = torch.randn(2, 3, dtype=torch.float64)
    table = Param((vocab, embed), "vocab embed", over="batch seq", dtype=torch.float64)
    equation = "batch seq embed, vocab embed -> batch seq vocab"

    def loss(x, w, **where):
        if fused:
            return linear_cross_entropy(x, w, labels, equation=equation, chunk=4, **FORMS[form], **where)
        sh = where["sh"] if where else Sharding()
        return cross_entropy(sh.dot(x, w, equation), labels, **FORMS[form], **where)

    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    expected = loss(*leaves)
    gx, gw = torch.autograd.grad(expected, leaves, g)
    with simulate(8):
        mesh = make_mesh("tp=8")
        sh = Sharding(mesh, standard_rules(mesh, uneven={"vocab": vocab}))
        stored = sh.shard_param(w, table).to_local().requires_grad_()
        stream = x.clone().requires_grad_()
        entered = sh(stream, "batch seq* embed -> batch seq embed | vocab")
        value = loss(entered, sh.use(stored, table), sh=sh, vocab_size=vocab)
        mine = torch.autograd.grad(value, [stream, stored], g)
        for rank in range(8):
            torch.testing.assert_close(per_rank(value)[rank], expected.detach(), rtol=0, atol=1e-13)
            torch.testing.assert_close(per_rank(mine[0])[rank], gx, rtol=0, atol=1e-13)
        torch.testing.assert_close(torch.cat(per_rank(mine[1])), gw, rtol=0, atol=1e-13)


def test_second_derivatives_without_the_filling():
    """A Hessian-vector product of the fused loss with filling is that of the loss without it."""
    torch.manual_seed(0)
    x, w = torch.randn(5, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    filled, filling = torch.cat([w, torch.zeros(2, 3, dtype=torch.float64)]), torch.arange(8) >= 6
    labels = torch.tensor([0, 5, -1, 2, 3])

    def statistic(x, w, filling):
        lse, target, _ = _LinearStatistics.apply(x, w, labels, filling, None, True, 2, 1.5, 0.9, 0.1 / 6, False, False)
        return (lse.square() - target).sum()

    def product(w, v, filling):
        grads = torch.func.grad(statistic, argnums=(0, 1))
        return torch.func.vjp(lambda x, w: grads(x, w, filling), x, w)[1](v)

    vx, vw = torch.randn_like(x), torch.randn_like(w)
    expected = product(w, (vx, vw), None)
    found = product(filled, (vx, torch.cat([vw, torch.zeros(2, 3, dtype=torch.float64)])), filling)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1][:6], expected[1], rtol=0, atol=1e-12)


def test_initial_values_and_shapes_at_rest():
    spec = {"w": Param((7, 4), "vocab embed", over="batch seq")}
    whole = init(spec, key(3))["w"]
    with simulate(4):
        rules = Rules({"vocab": "tp", "embed": None, "batch": None, "seq": None}, uneven={"vocab": 7})
        sh = Sharding(make_mesh("dp=1,tp=4"), rules)
        made = init(spec, key(3), sh=sh)["w"]
        assert made.shape == (7, 4)
        assert [tuple(p.shape) for p in per_rank(made.to_local())] == [(2, 4), (2, 4), (2, 4), (1, 4)]
        assert torch.equal(torch.cat(per_rank(made.to_local())), whole)
    assert abstract(spec)["w"].shape == (7, 4)


def test_a_batch_is_filled_up_behind_its_last_row_and_token():
    tokens = torch.arange(15).view(3, 5) + 1
    batch = {"tokens": tokens, "labels": tokens + 1, "mask": torch.ones(3, 5, dtype=torch.bool)}
    batch["segments"] = torch.zeros(3, 5, dtype=torch.long)
    with simulate(4):
        mesh = make_mesh("dp=2,cp=2")
        sh = Sharding(mesh, standard_rules(mesh))
        assert divisible_size(3, "batch", sh) == 4
        assert divisible_size(5, "seq", sh) == 8  # twice the ranks, for the zigzag order
        held = {n: per_rank(x) for n, x in shard_batch(batch, sh).items()}
        assert all(x.shape == (2, 4) for x in held["tokens"])
        # rank 3: row 2 and one more; chunks 1 and 2 of four
        assert held["tokens"][3].tolist() == [[13, 14, 15, 0], [0] * 4]
        assert held["labels"][3].tolist() == [[14, 15, 16, -100], [-100] * 4]
        assert held["mask"][3].tolist() == [[True] * 3 + [False], [False] * 4]
        assert held["segments"][3].tolist() == [[0, 0, 0, -1], [-1] * 4]
        at, there = (per_rank(t)[2] for t in held_positions(5, "seq", sh))
        assert at.tolist() == [0, 1, 4, 4] and there.tolist() == [False, False, True, True]
        with pytest.raises(UserError, match=r"filling=\{'pixels'"):
            shard_batch({"pixels": tokens}, sh)
        assert shard_batch({"pixels": tokens}, sh, filling={"pixels": 7})["pixels"] is not None
    local = overwritten({"tokens": tokens, "labels": tokens}, torch.tensor([False, False, True]), None)
    assert local["labels"][2].tolist() == [-100] * 5 and local["labels"][:2].equal(tokens[:2])
    assert shard_batch(batch, Sharding())["tokens"].equal(tokens)


def test_refusals():
    mesh = make_mesh("tp=4", abstract=True)
    rules = standard_rules(mesh)
    spec = {"w": Param((7, 4), "vocab embed", over="batch seq")}
    with pytest.raises(ShardingError, match=r"'vocab' of size 7 .*uneven=\{'vocab': 7\}"):
        Sharding(mesh, rules).check_spec(spec)
    with pytest.raises(ShardingError, match="has size 7, but the rules say"):
        Sharding(mesh, dataclasses.replace(rules, uneven={"vocab": 9})).check_spec(spec)
    with pytest.raises(UserError, match="'seq' is in zigzag and in uneven"):
        standard_rules(make_mesh("cp=4", abstract=True), uneven={"seq": 9})
    with pytest.raises(UserError, match="without a mark"):
        standard_rules(mesh, uneven={"seq*": 9})
    nested = make_mesh("tp=4", kv_heads=2, abstract=True)
    some = dataclasses.replace(standard_rules(nested, uneven={"vocab": 7}))
    some = dataclasses.replace(some, compute={**some.compute, "vocab'": "tp_kv"})
    with pytest.raises(ShardingError, match="would keep tp_kv of them"):
        Sharding(nested, some)._plan_move("batch seq vocab -> batch seq vocab'")


def test_a_second_backward_of_a_tapped_loss_makes_its_logits_again():
    """The gradient by logits takes the memory of the kept probabilities, once."""
    torch.manual_seed(0)
    x, w = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 6))
    root = torch.zeros((), dtype=torch.float64).expand(5, 6).requires_grad_()
    labels = torch.tensor([0, 5, -1, 2, 3])
    lse, target, _ = _LinearStatistics.apply(x, w, labels, None, root, True, 2, None, 1.0, 0.0, True, False)
    value = (lse.square() - target).sum()
    first = [g.clone() for g in torch.autograd.grad(value, [x, root], retain_graph=True)]
    again = torch.autograd.grad(value, [x, root])
    torch.testing.assert_close(again, tuple(first), rtol=0, atol=1e-14)
