"""Trees of leaves for the tests of optimizers, and what may be said of two of them."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fmegatron import tree
from fmegatron.simulation import keep_alive, lift, per_rank

SHAPES = {
    "embed": (7, 5),
    "layers": {0: {"q": (5, 3, 2), "norm": (5,)}, 1: {"q": (5, 3, 2), "norm": (5,)}},
    "scale": (),
}


def is_shape(x):
    return isinstance(x, tuple)


def made(seed, dtype=torch.float32, shapes=SHAPES, device="cpu"):
    generator = torch.Generator().manual_seed(seed)

    def walk(s):
        if is_shape(s):
            return torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype)
        return {k: walk(v) for k, v in s.items()}

    return walk(shapes)


def same(a, b):
    """Bitwise, in structure too."""
    assert tree.structure(a) == tree.structure(b)
    for path, x, y in zip(tree.paths(a), tree.leaves(a), tree.leaves(b), strict=True):
        assert torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, torch.Tensor) else x == y, path


def close(a, b, rtol):
    for path, x, y in zip(tree.paths(a), tree.leaves(a), tree.leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=rtol, msg=lambda m, path=path: f"{path}: {m}")


def cloned(t):
    return tree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, t)


def ours(optimizer, params, gradients, donate=False):
    params, state = cloned(params), optimizer.init(params)
    for grads in gradients:
        params, _, state = optimizer.update(params, cloned(grads), state, donate=donate)
    return params, state


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            self.calls.append(str(func.overloadpacket))
            written = func._schema.is_mutable or func.is_view
            if isinstance(out, torch.Tensor) and not written:
                self.largest = max(self.largest, out.numel())
        return out


def placed(values, mesh, placements):
    """The values as DTensors; placements: a tree of tuples."""

    def one(x, p):
        return distribute_tensor(x, mesh, p, src_data_rank=None)

    def walk(v, p):
        return {k: walk(v[k], p[k]) for k in v} if isinstance(v, dict) else one(v, p)

    return walk(values, placements)


def simulated_mesh(*sizes):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abcd"[: len(sizes)]))
    keep_alive(mesh)
    return mesh


def same_on_ranks(got, want, rtol=0.0):
    """To rtol: torch's CPU kernels round the last elements of a buffer, past the vector width, differently."""
    for path, x, y in zip(tree.paths(got), tree.leaves(got), tree.leaves(want), strict=True):
        assert isinstance(x, DTensor) and x.placements == y.placements and x.shape == y.shape, path
        ranks = [per_rank(lift(t.to_local(), x.device_mesh.size())) for t in (x, y)]
        for a, b in zip(*ranks, strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=rtol, msg=lambda m, path=path: f"{path}: {m}")
