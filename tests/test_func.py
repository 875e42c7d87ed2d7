"""torch.func on a whole model: {grad, vjp, vmap of grad, jacrev, Hessian-vector product} × {no mesh, dp × tp with
sequence parallelism, FSDP}, each equal to torch.autograd on one device in float64, or refused."""

import pytest
import torch

from fmegatron import tree
from fmegatron.accumulate import accumulate
from fmegatron.context import Ctx
from fmegatron.errors import ShardingError, UserError
from fmegatron.func import jacrev, vmap
from fmegatron.grad import value_and_grad
from fmegatron.mesh import everywhere, make_mesh
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.remat import nothing
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import init, params_of

DOUBLE = Precision(params=torch.float64)
CONFIG = DecoderConfig(vocab=8, embed=8, layers=1, heads=4, kv_heads=2, head=2, mlp=8, tied=True)
MODEL = Decoder(CONFIG)
SPEC = MODEL.spec()
ROWS, SEQ, ITEMS = 4, 4, 2
PARAMS = init(SPEC, key(0), sh=Sharding(precision=DOUBLE))
VECTOR = init(SPEC, key(1), sh=Sharding(precision=DOUBLE))
G = torch.Generator().manual_seed(0)
# `items` batches, each with its rows over dp
BATCHES = {n: torch.randint(0, CONFIG.vocab, (ITEMS, ROWS, SEQ), generator=G) for n in ("tokens", "labels")}
WHERE = {"no mesh": None, "dp × tp, SP": ("dp=2,tp=2", True, ()), "FSDP": ("dp=4,tp=1", False, ("dp",))}


def loss(params, batch, sh, model=MODEL):
    terms, _ = model.loss(params, batch, Ctx(sh=sh))
    return sh.sum(terms["lm"].items, "batch seq ->") / (ROWS * SEQ)


def rows(params, batch, sh):
    """Each row's loss, on all ranks."""
    terms, _ = MODEL.loss(params, batch, Ctx(sh=sh))
    return sh(sh.sum(terms["lm"].items, "batch seq -> batch"), "batch -> every")


def item(batch, i):
    return {n: x[i] for n, x in batch.items()}


def some(params):
    """A leaf by which Jacobians are taken, and the tree with it replaced."""
    return params["norm"], lambda w: {**params, "norm": w}


def transforms(params, vector, batch, sh, spec=SPEC):
    """{name: (value, what it is by: "params", "items of params" or "norm")}."""
    one, (norm, put) = item(batch, 0), some(params)
    found = {}
    found["grad"] = torch.func.grad(loss)(params, one, sh), "params"
    found["vjp"] = (
        torch.func.vjp(lambda p: loss(p, one, sh), params)[1](torch.tensor(1.0, dtype=torch.float64))[0],
        "params",
    )
    each = vmap(torch.func.grad(lambda p, b: loss(p, b, sh)), (None, 0), sh=sh, dim="")
    found["vmap(grad)"] = each(params, batch), "items of params"
    each = vmap(lambda b: value_and_grad(lambda p: loss(p, b, sh))(params)[1], sh=sh, dim="")
    found["vmap(value_and_grad)"] = each(batch), "items of params"
    found["jacrev"] = jacrev(lambda w: rows(put(w), one, sh), sh=sh, dims="every")(norm), "rows of norm"

    def along(p):
        return sh.inner(torch.func.grad(loss)(p, one, sh), vector, spec)

    found["HVP by grad of grad"] = torch.func.grad(along)(params), "params"
    again = torch.func.grad(lambda p: sh.inner(value_and_grad(lambda q: loss(q, one, sh))(p)[1], vector, spec))
    found["HVP by grad of value_and_grad"] = again(params), "params"
    return found


def expected():
    """The same by torch.autograd alone, on one device."""
    sh, found = Sharding(precision=DOUBLE), {}

    def leaves_of(params):
        flat = [w.detach().clone().requires_grad_() for w in tree.leaves(params)]
        return flat, tree.like(params, flat)

    grads = []
    for i in range(ITEMS):
        flat, p = leaves_of(PARAMS)
        grads.append(torch.autograd.grad(loss(p, item(BATCHES, i), sh), flat))
    found["grad"] = found["vjp"] = tree.like(PARAMS, list(grads[0]))
    found["vmap(grad)"] = found["vmap(value_and_grad)"] = tree.like(
        PARAMS, [torch.stack(g) for g in zip(*grads, strict=True)]
    )
    flat, p = leaves_of(PARAMS)
    each = rows(p, item(BATCHES, 0), sh)
    found["jacrev"] = torch.stack([torch.autograd.grad(y, p["norm"], retain_graph=True)[0] for y in each])
    first = torch.autograd.grad(loss(p, item(BATCHES, 0), sh), flat, create_graph=True)
    along = sum((g * v).sum() for g, v in zip(first, tree.leaves(VECTOR), strict=True))
    product = tree.like(PARAMS, list(torch.autograd.grad(along, flat)))
    found["HVP by grad of grad"] = found["HVP by grad of value_and_grad"] = product
    return found


WANTED = expected()


def local(sh, tree_, lead=0):
    """Each rank's shards of a tree like the parameters, whose leaves may have a leading dim of items."""

    def one(x, p):
        x = everywhere(sh.mesh, x) if sh.mesh is not None else x
        if sh.mesh is None:
            return x
        for d, by in enumerate(sh._stored(p)[1]):
            if sh.mesh.live(by):
                x = x.index_select(d + lead, sh.positions(by, p.shape[d]))
        return x

    return tree.like(tree_, [one(x, p) for x, p in zip(tree.leaves(tree_), params_of(SPEC).values(), strict=True)])


def close(got, want):
    got, want = per_rank(got.detach()), per_rank(want)
    got = got * len(want) if len(got) == 1 else got
    assert max(float((a - b).norm() / (b.norm() + 1e-3)) for a, b in zip(got, want, strict=True)) < 1e-11


def compare(sh, batch):
    found = transforms(local(sh, PARAMS), local(sh, VECTOR), batch, sh)
    for name, (got, kind) in found.items():
        want = WANTED[name]
        if kind == "rows of norm":
            close(got, norm_rows(sh, want))
            continue
        want = local(sh, want, lead=1 if kind.startswith("items") else 0)
        for g, w in zip(tree.leaves(got), tree.leaves(want), strict=True):
            close(g, w)


def norm_rows(sh, x):
    """Each rank's part of a Jacobian [rows embed] by the last norm's weight at rest."""
    if sh.mesh is None:
        return x
    x = everywhere(sh.mesh, x)
    (by,) = sh._stored(SPEC["norm"])[1]
    return x.index_select(1, sh.positions(by, CONFIG.embed)) if sh.mesh.live(by) else x


def sharding(where):
    if where is None:
        return Sharding(precision=DOUBLE)
    axes, sp, store = where
    mesh = make_mesh(axes, kv_heads=CONFIG.kv_heads, device="cpu")
    rules = standard_rules(mesh, sequence_parallel=sp, store=store)
    return Sharding(mesh, type(rules)({**rules.compute, "every": None}, store), precision=DOUBLE)


@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
def test_torch_func(where):
    if where is None:
        compare(sharding(None), BATCHES)
        return
    with simulate(4):
        sh = sharding(where)
        compare(sh, {n: items(sh, x) for n, x in BATCHES.items()})


def items(sh, x):
    x = everywhere(sh.mesh, x)
    return x.index_select(1, sh.index("batch", ROWS)) if sh.axes("batch") else x


def test_what_would_be_wrong_is_refused():
    with simulate(4):
        sh = sharding(WHERE["FSDP"])
        with pytest.raises(ShardingError, match="vmap over dim 'batch', which lies on mesh axes dp"):
            vmap(lambda x: x, sh=sh, dim="batch")
        with pytest.raises(ShardingError, match="jacrev of an output with dim 'batch'"):
            jacrev(lambda x: x, sh=sh, dims="batch")
        params = sh.shard_params(PARAMS, SPEC)
        batch = item({n: items(sh, x) for n, x in BATCHES.items()}, 0)
        with pytest.raises(UserError, match=r"sh\.local"):  # torch.func hides DTensors
            torch.func.grad(loss)(params, batch, sh)
        (value, _), grads = accumulate(MODEL.loss, weights=MODEL.weights)(params, batch, Ctx(sh=sh))  # ours takes them
        assert [g.placements for g in tree.leaves(grads)] == [p.placements for p in tree.leaves(params)]


def test_forward_mode_is_refused_by_torch():
    with simulate(4):
        sh = sharding(WHERE["FSDP"])
        params, batch = local(sh, PARAMS), item({n: items(sh, x) for n, x in BATCHES.items()}, 0)
        with pytest.raises((NotImplementedError, RuntimeError)):
            torch.func.jvp(lambda p: loss(p, batch, sh), (params,), (params,))


def test_recomputation_composes_with_torch_func():
    sh, model = Sharding(precision=DOUBLE), Decoder(CONFIG, save=nothing)
    got = torch.func.grad(lambda p: loss(p, item(BATCHES, 0), sh, model))(PARAMS)
    for g, w in zip(tree.leaves(got), tree.leaves(WANTED["grad"]), strict=True):
        close(g, w)
