"""`sh` exactly: one program with every kind of annotation, on many rule tables of simulated ranks, against the same
program without a
mesh in float64: loss, raw gradients in the layout at rest, Hessian-vector products."""

import dataclasses

import pytest
import torch

from fmegatron import tree
from fmegatron.mesh import make_mesh
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import init, params_of
from tests import exact_model as M

DOUBLE = Precision(params=torch.float64)
STREAM = {"seq*": ("cp", "tp")}
TP = dict(kv="tp_kv", group="tp_group", mlp="tp", vocab="tp")
HEADS = dict(kv="tp_kv", group="tp_group")
DATA = dict(batch="dp", **{"batch'": "dp"}, seq="cp", **{"seq'": "cp"})


@dataclasses.dataclass(frozen=True)
class Table:
    mesh: str
    rows: dict
    store: tuple = ()
    kind: str = "dense"
    kv_heads: int = 2
    also: tuple = ()
    order: tuple | None = None

    def __str__(self):
        return f"{self.mesh}-{self.kind}-{'+'.join(k for k, v in self.rows.items() if v)}-{self.store}"


def rows(*parts, **more):
    found = {}
    for part in parts:
        found |= part
    return {**found, **more}


MESH4, MESH8 = "dp=1,cp=1,tp=4", "dp=2,cp=1,tp=4"
TABLES = [
    Table(MESH4, rows(DATA, TP)),
    Table(MESH4, rows(DATA, TP, STREAM)),
    Table(MESH4, rows(DATA, dict(mlp="tp", vocab="tp"), STREAM)),  # rules removed one by one
    Table(MESH4, rows(DATA, HEADS, dict(vocab="tp"), STREAM)),
    Table(MESH4, rows(DATA, HEADS, dict(mlp="tp"), STREAM)),
    Table(MESH4, rows(DATA, HEADS)),
    Table(MESH4, rows(DATA, STREAM)),
    Table(MESH4, rows(DATA, dict(kv="tp_kv"), STREAM)),
    Table("dp=1,cp=1,tp=2", rows(DATA, TP, STREAM), kv_heads=1),  # kv heads fewer than tp
    Table(MESH8, rows(DATA, TP, STREAM), store=("dp",)),
    Table("dp=2,cp=2,tp=1", rows(DATA), store=("dp", "cp")),
    Table("dp=1,cp=2,tp=4", rows(DATA, TP, STREAM), store=("cp",)),
    Table("dp=2,cp=1,tp=4", rows(DATA, TP, STREAM, expert=("tp", "dp"), **{"batch'": None})),
    Table(
        "dp=2,cp=1,tp=2", rows(DATA, TP, STREAM, expert="dp", emlp="tp", **{"batch'": None}), kind="a2a", store=("dp",)
    ),
    Table("dp=2,cp=1,tp=2", rows(DATA, TP, expert=("tp", "dp"), **{"batch'": None}), kind="a2a", store=("dp",)),
    Table(
        "dp=2,cp=2,tp=2",
        rows(DATA, TP, STREAM, expert=("tp", "dp", "cp"), **{"batch'": None, "seq'": None}),
        kind="a2a",
    ),
]


def data():
    g = torch.Generator().manual_seed(0)
    params = init(M.spec(), key(0), sh=Sharding(precision=DOUBLE))
    vector = init(M.spec(), key(1), sh=Sharding(precision=DOUBLE))
    batch = {n: torch.randint(0, M.V, (M.B, M.S), generator=g) for n in ("tokens", "labels")}
    return params, vector, batch


def derivatives(params, vector, batch, sh, sp, kind, bug=None, second=True):
    """(loss, gradients, Hessian-vector product) by local leaves."""
    flat = [w.detach().requires_grad_() for w in tree.leaves(sh.local(params))]
    loss = M.loss(tree.like(params, flat), batch, sh, sp, kind, bug)
    grads = torch.autograd.grad(loss, flat, create_graph=second)
    if not second:
        return loss.detach(), grads, None
    along = 0.0
    for g, v, p in zip(grads, tree.leaves(sh.local(vector)), tree.leaves(sp), strict=True):
        along = along + sh((g * v).sum(), **{a: ("P", "I") for a in sh.held_by(p)})
    return loss.detach(), [g.detach() for g in grads], torch.autograd.grad(along, flat)


def worst(got, want, sh, sp):
    """Largest error of a leaf over all ranks, relative as the design's bound says, and which leaf."""
    floor = 1e-3 * sum(r.norm() ** 2 for r in want) ** 0.5 / len(want) ** 0.5
    found = (0.0, "")
    for g, r, (path, p) in zip(got, want, params_of(sp).items(), strict=True):
        mine, theirs = per_rank(g.detach()), per_rank(sh.local(sh.shard_param(r.detach(), p)))
        if len(mine) == 1:
            mine = mine * len(theirs)
        error = max(float((a - b).norm() / torch.maximum(r.norm(), floor)) for a, b in zip(mine, theirs, strict=True))
        found = max(found, (error, path))
    return found


DATA_SET = data()  # made outside of simulation, where torch's own generators differ by rank


@pytest.fixture(scope="module")
def reference():
    params, vector, batch = DATA_SET
    plain = Sharding(precision=DOUBLE)
    return {kind: derivatives(params, vector, batch, plain, M.spec(), kind) for kind in ("dense", "a2a")}


def run(table, kind=None, bug=None, second=True, sp=None):
    params, vector, batch = DATA_SET
    sp = sp or M.spec()
    mesh = make_mesh(table.mesh, kv_heads=table.kv_heads, also=table.also, order=table.order, device="cpu")
    present = set(mesh.sizes) | set(mesh.names)

    def keep(row):  # a mesh with tp=1 has no tp_kv
        names = (row,) if isinstance(row, str) else row or ()
        return tuple(n for n in names if n in present)

    table_rows = {k: keep(v) for k, v in table.rows.items()}
    sh = Sharding(mesh, M.rules(table.store, **table_rows), precision=DOUBLE)
    local = {n: sh.shard(x, "batch seq") for n, x in batch.items()}
    placed = sh.shard_params(params, sp), sh.shard_params(vector, sp)
    return sh, derivatives(*placed, local, sh, sp, kind or table.kind, bug, second)


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_every_table_computes_the_same_function(table, reference):
    loss, grads, products = reference[table.kind]
    import math

    from fmegatron.mesh import parse_axes

    with simulate(math.prod(parse_axes(table.mesh).values())):
        sh, (got, got_grads, got_products) = run(table)
        assert max(abs(float(x) - float(loss)) for x in per_rank(got)) < 1e-12 * abs(float(loss))
        assert worst(got_grads, grads, sh, M.spec()) < (1e-12,)
        assert worst(got_products, products, sh, M.spec()) < (1e-12,)


@pytest.mark.parametrize("bug", ["mean_local", "loss_local", "no_region", "norm_over", "rope_key_over"])
def test_planted_errors_give_wrong_numbers(bug):
    """The comparison above is tight enough to see them (`mean_local` is the one that the checking mode cannot)."""
    params, vector, batch = DATA_SET
    sp = M.spec(bug)
    loss, grads, _ = derivatives(params, vector, batch, Sharding(precision=DOUBLE), sp, "dense", bug, second=False)
    with simulate(8):
        sh, (got, got_grads, _) = run(TABLES[9], bug=bug, second=False, sp=sp)
        wrong = max(abs(float(x) - float(loss)) for x in per_rank(got)) > 1e-3
        assert wrong or worst(got_grads, grads, sh, sp)[0] > 1e-3
