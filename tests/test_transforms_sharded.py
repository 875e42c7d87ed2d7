"""The transforms on simulated ranks: data parallel with stored shards (FSDP), and leaves at rest as DTensors."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.func import grad

from fmegatron.accumulate import accumulate
from fmegatron.context import Ctx
from fmegatron.grad import to_local, value_and_grad
from fmegatron.initializers import Zeros
from fmegatron.mesh import make_mesh
from fmegatron.parallel.stack import stack
from fmegatron.rules import Rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import Param
from fmegatron.tree import leaves, tree_map
from tests.transforms_model import (
    POLICIES,
    T,
    close,
    copies,
    embed,
    head,
    loss_of,
    make_batch,
    make_params,
    ones,
    ref_run,
    reference,
    scalar_of,
    small_block,
    weights,
)

DIMS = {
    "norm1": "embed",
    "q": "embed heads head",
    "k": "embed heads head",
    "v": "embed heads head",
    "o": "heads head embed",
    "norm2": "embed",
    "up": "embed mlp",
    "down": "mlp embed",
    "bias": "embed",
    "table": "vocab embed",
    "norm": "embed",
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def small_params(**options):
    return make_params(layers=2, vocab=12, only={"norm1", "q", "o", "bias", "up"}, **options)


def spec_of(p):
    """The spec of these parameters."""

    def leaf(name, t):
        return Param(tuple(t.shape), DIMS[name], Zeros(), over="batch seq", dtype=T)

    layers = {i: {n: leaf(n, t) for n, t in q.items()} for i, q in p["layers"].items()}
    return {"table": leaf("table", p["table"]), "layers": layers, "norm": leaf("norm", p["norm"])}


def setup(store):
    mesh = make_mesh("dp=2", device="cpu")
    unsharded = dict.fromkeys(("seq", "embed", "heads", "head", "mlp", "vocab"))
    return Sharding(mesh, Rules(compute={"batch": "dp", **unsharded}, store=store))


def run_of(layers, spec):
    """The model on stored shards: embedding and head by sh.use, layers by the stack."""

    def run(p, ctx):
        outer = ctx.sh.use({k: p[k] for k in ("table", "norm")}, {k: spec[k] for k in ("table", "norm")})
        return head(outer, layers(p["layers"], embed(outer, None, ctx), ctx), ctx)

    return run


def whole_of(t, sh, param):
    """A leaf's global value, from what the ranks hold at rest."""
    if isinstance(t, DTensor):
        t = t.to_local()
    parts = per_rank(t)
    cut = [d for d, (n, local) in enumerate(zip(param.shape, parts[0].shape, strict=True)) if n != local]
    return torch.cat(parts, cut[0]) if cut else parts[0]


@pytest.mark.parametrize(
    ("policy", "store", "free", "microbatches"),
    [
        ("everything", (), True, 3),
        *((policy, ("dp",), policy != "nothing", 3) for policy in POLICIES),
        ("nothing", ("dp",), True, 1),
    ],
)
def test_data_parallel_and_fsdp(policy, store, free, microbatches):
    p, batch = small_params(), make_batch(vocab=12)
    value, want = reference(p, batch, layer=small_block)
    spec = spec_of(p)
    with simulate(2):
        sh = setup(store)
        at_rest = tree_map(sh.shard_param, p, spec)
        local = {k: sh.shard(t, "batch seq") for k, t in batch.items()}
        layers = stack(small_block, spec["layers"], save=POLICIES[policy], free=free)
        f = accumulate(loss_of(run_of(layers, spec)), microbatches, weights=weights)
        (total, metrics), grads = f(at_rest, local, Ctx(sh))
        close(per_rank(total)[0], value)
        assert all(torch.equal(t, per_rank(total)[0]) for t in per_rank(total))
        assert per_rank(metrics["weights"]["lm"])[0] == batch["mask"].sum()
        for g, t in zip(leaves(grads), leaves(at_rest), strict=True):
            assert isinstance(g, DTensor) and g.placements == t.placements and g.shape == t.shape
        close(tree_map(lambda g, param: whole_of(g, sh, param), grads, spec), want)


@pytest.mark.parametrize("policy", ["everything", "nothing"])
def test_split_of_a_stack_on_stored_shards(policy):
    p, batch = small_params(), make_batch(vocab=12)
    spec, layers_want = spec_of(p), p["layers"]
    x = {"x": torch.randn(6, 5, 8, dtype=T), "aux": torch.zeros(6, dtype=T)}
    q, plain = copies(layers_want), x
    ctx = Ctx(segments=batch["segments"])
    for i in sorted(q):
        plain = small_block(q[i], plain, ctx)
    want = torch.autograd.grad(sum(t.sum() for t in leaves(plain)), leaves(q))
    with simulate(2):
        sh = setup(("dp",))
        local = to_local(tree_map(sh.shard_param, layers_want, spec["layers"]))
        ctx = Ctx(sh, segments=sh.shard(batch["segments"], "batch seq"))
        carry = {"x": sh.shard(x["x"], "batch seq embed"), "aux": sh.shard(x["aux"], "batch")}
        s = stack(small_block, spec["layers"], save=POLICIES[policy]).split
        y, residual = s.forward(local, carry, ctx)
        _, left = s.backward_input(residual, ones(y), local)
        grads = s.backward_weight(left)
        close(leaves(tree_map(lambda g, param: whole_of(g, sh, param), grads, spec["layers"])), want)


@pytest.mark.parametrize("policy", ["everything", "nothing"])
def test_torch_func_on_stored_shards(policy):
    p, v, batch = small_params(), small_params(seed=5), make_batch(vocab=12)
    spec = spec_of(p)
    flat = torch.utils._pytree.tree_leaves

    def along(g, v):
        return sum((s * t).sum() for s, t in zip(flat(g), flat(v), strict=True))

    want_gradient = grad(scalar_of(lambda p, ctx: ref_run(p, ctx, small_block)))
    want = grad(lambda p: along(want_gradient(p, batch), v))(p)
    with simulate(2):
        sh = setup(("dp",))
        local, lv = to_local(tree_map(sh.shard_param, (p, v), (spec, spec)))
        parts = {k: sh.shard(t, "batch seq") for k, t in batch.items()}
        run = loss_of(run_of(stack(small_block, spec["layers"], save=POLICIES[policy]), spec))
        f = accumulate(run, 2, weights=weights)
        gradient = value_and_grad(lambda p: f(p, parts, Ctx(sh))[0][0])(local)[1]
        close(tree_map(lambda g, param: whole_of(g, sh, param), gradient, spec), want_gradient(p, batch))
        hvp = grad(lambda p: along(f(p, parts, Ctx(sh))[1], lv))(local)
        close(tree_map(lambda g, param: whole_of(g, sh, param), hvp, spec), want)
