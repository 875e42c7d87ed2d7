"""Products whose gather or scatter runs beside them: the same function as whole, and what is issued and awaited when."""

import functools
import time
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from torch.func import grad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fmegatron.overlap
from fmegatron import collectives, tree
from fmegatron.checking import check
from fmegatron.context import Ctx
from fmegatron.errors import ShardingError, UserError
from fmegatron.initializers import Normal
from fmegatron.mesh import make_mesh
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.recording import record_collectives
from fmegatron.remat import names, nothing, remat
from fmegatron.rules import Rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import Param, init
from fmegatron.split import everything, split
from tests.processes import processes

torch.set_num_threads(1)
pytestmark = pytest.mark.xdist_group("gloo")

B, S, D, KV, G, H, M = 4, 16, 6, 2, 2, 3, 10
UP, DOWN = "batch seq* embed, embed mlp -> batch seq mlp", "batch seq mlp, mlp embed -> batch seq* embed"
DOUBLE = Precision(params=torch.float64)


def leaf(shape, dims, over="batch seq"):
    return Param(shape, dims, Normal(0.5), over=over)


SPEC = {
    "q": leaf((D, KV, G, H), "embed kv group head"),
    "k": leaf((D, KV, H), "embed kv head", "batch seq group"),
    "o": leaf((KV, G, H, D), "kv group head embed"),
    "up": leaf((D, M), "embed mlp"),
    "down": leaf((M, D), "mlp embed"),
}
# Made outside of simulation, where torch's own generators differ by rank.
PARAMS, VECTOR = (init(SPEC, key(i), sh=Sharding(precision=DOUBLE)) for i in (0, 1))
X = torch.randn(B, S, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def block(p, x, ctx, n):
    """Products of both kinds; of `k`, which lacks a dim of its region; with the stream read by two and by one."""
    dot = functools.partial(ctx.sh.dot, overlap=n)
    q = dot(x, p["q"], "batch seq* embed, embed kv group head -> batch seq kv group head", name="q")
    k = dot(x, p["k"], "batch seq* embed, embed kv head -> batch seq kv head | group", name="k")
    a = q.sin() * k[:, :, :, None]
    x = x + dot(a, p["o"], "batch seq kv group head, kv group head embed -> batch seq* embed", name="o")
    return x + dot(dot(x, p["up"], UP, name="up").tanh(), p["down"], DOWN, name="down")


def plain(p, x):
    """The same in torch's own operations."""
    q, k = torch.einsum("bse,ekgh->bskgh", x, p["q"]), torch.einsum("bse,ekh->bskh", x, p["k"])
    x = x + torch.einsum("bskgh,kghe->bse", q.sin() * k[:, :, :, None], p["o"])
    return x + (x @ p["up"]).tanh() @ p["down"]


def weight(x):
    """Gradients of a result: another one for every element."""
    return torch.arange(x.numel(), dtype=x.dtype).view(x.shape).cos()


@dataclass(frozen=True)
class Table:
    mesh: str
    rows: dict
    zigzag: dict = field(default_factory=dict)
    kv_heads: int = 2

    @property
    def world(self):
        return 4

    def sharding(self, **options):
        mesh = make_mesh(self.mesh, kv_heads=self.kv_heads, device="cpu")
        rows = dict.fromkeys(("batch", "seq", "embed", "kv", "group", "head", "mlp")) | self.rows
        rules = Rules(compute=rows, zigzag=self.zigzag, uneven={"mlp": M})
        return Sharding(mesh, rules, precision=DOUBLE, **options)


HEADS = {"kv": "tp_kv", "group": "tp_group"}
TABLES = {
    "sp": Table("tp=4", {**HEADS, "mlp": "tp", "seq*": "tp"}),
    "no sp": Table("tp=4", {**HEADS, "mlp": "tp"}),
    "cp": Table("cp=2,tp=2", {"kv": "tp", "mlp": "tp", "seq": "cp", "seq*": ("cp", "tp")}, {"seq": "cp"}),
    # dims on some of the axes that the stream lies on: gathered in two steps, to two types
    "partly": Table("tp=4", {"kv": "tp_kv", "mlp": "tp_group", "seq*": "tp"}),
    "dp": Table("dp=2,tp=2", {"batch": "dp", "group": "tp", "mlp": "tp", "seq*": "tp"}),
    "sp alone": Table("dp=2,tp=2", {"batch": "dp", "seq*": "tp"}),
}


def same(got, want):
    """Tensors of all ranks alike, to rounding."""
    for a, b in zip(got, want, strict=True):
        a, b = per_rank(a.detach()), per_rank(b.detach())
        for r in range(max(len(a), len(b))):
            x, y = a[r % len(a)], b[r % len(b)]
            assert x.shape == y.shape and (x - y).norm() <= 1e-12 * y.norm()


def local(sh, values):
    """Global values of SPEC's leaves as the ranks hold them."""
    return sh.local(sh.shard_params(values, SPEC))


def run(sh, n, rows=B, wrap=lambda f: f):
    """[result, gradient by x, gradients by the parameters at rest] of this rank."""
    p = [t.detach().requires_grad_() for t in tree.leaves(local(sh, PARAMS))]
    x = sh.shard(X[:rows], "batch seq* embed").detach().requires_grad_()
    y = wrap(functools.partial(block, n=n))(sh.use(tree.like(SPEC, p), SPEC), x, Ctx(sh))
    g = sh.shard(weight(X[:rows]), "batch seq* embed")
    return [y.detach(), *torch.autograd.grad(y, [x, *p], g)]


def expected(sh, rows=B):
    """The same of `plain`, as this rank holds it."""
    p = [t.clone().requires_grad_() for t in tree.leaves(PARAMS)]
    x = X[:rows].clone().requires_grad_()
    y = plain(tree.like(SPEC, p), x)
    gx, *gp = torch.autograd.grad(y, [x, *p], weight(x))
    stream = [sh.shard(t.detach(), "batch seq* embed") for t in (y, gx)]
    return [*stream, *tree.leaves(local(sh, tree.like(SPEC, gp)))]


def chunks(f):
    """(f(), the number of chunks of every product that was cut, forward and backward)."""
    original, found = fmegatron.overlap.division, []

    def division(*args):
        count, row = original(*args)
        found.append(count)
        return count, row

    fmegatron.overlap.division = division
    try:
        return f(), found
    finally:
        fmegatron.overlap.division = original


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_chunks_compute_the_same_function(table):
    """Along the batch, and in a batch of one or two along the sequence."""
    with simulate(4):
        sh = table.sharding()
        for rows, n in [(B, 2), (2 if sh.axes("batch") else 1, 4)]:
            got, found = chunks(lambda: run(sh, n, rows))  # noqa: B023 (used at once)
            assert set(found) <= {1, n} and found.count(n) >= 5, found
            same(got, expected(sh, rows))


def test_as_many_chunks_as_divide():
    """0 and 1: the product is whole. 3 of a batch of 4: two chunks. Without a mesh: nothing to run beside."""
    with simulate(4):
        sh = TABLES["sp"].sharding()
        want = expected(sh)
        for n, most in ((0, None), (1, None), (3, 2), (16, 4)):
            got, found = chunks(lambda: run(sh, n))  # noqa: B023 (used at once)
            assert max(found, default=None) == most
            same(got, want)
    sh = Sharding(precision=DOUBLE)
    same(run(sh, 2), expected(sh))


@pytest.mark.parametrize("n", [-1, 2.0, True, "2", None])
def test_a_bad_number_of_chunks_is_refused(n):
    for sh in (Sharding(), Sharding(make_mesh("tp=4", abstract=True, device="cpu"), Rules({"a": None, "b": None}))):
        with pytest.raises(UserError, match=r"overlap=.* must be 0 \(no overlap\) or a number of chunks"):
            sh.dot(torch.ones(2, 2), torch.ones(2, 2), "a b, b c -> a c", overlap=n)


def integers(*shape):
    """float32 whose sums are exact in any order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


def test_exact_sums_are_equal_bit_for_bit():
    """So every element is where it was: what is left to rounding is the products' own sums."""
    x, up, down = integers(B, S, D), integers(D, M), integers(M, D)
    with simulate(4):
        sh = TABLES["partly"].sharding()
        given = [sh.shard(t, n) for t, n in ((x, "batch seq* embed"), (up, "embed mlp"), (down, "mlp embed"))]

        def run(n):
            x, up, down = (t.detach().requires_grad_() for t in given)
            y = sh.dot(sh.dot(x, up, UP, overlap=n), down, DOWN, overlap=n)
            return [y, *torch.autograd.grad(y, [x, up, down], sh.shard(integers(B, S, D), "batch seq* embed"))]

        for n in (2, 4):
            for got, want in zip(run(n), run(0), strict=True):
                assert all(torch.equal(a, b) for a, b in zip(per_rank(got), per_rank(want), strict=True))


# ---------------------------------------------------------------------------------------------------- transforms


def scalar(sh, y):
    return sh.sum(y.sin(), "batch seq* embed ->") if sh.mesh is not None else y.sin().sum()


@pytest.mark.parametrize("name", ["sp", "no sp", "cp"])
def test_second_derivatives(name):
    """The gradient of the gradient along a direction, by torch.func and by autograd."""
    plainly = grad(lambda p: scalar(Sharding(), plain(p, X)))
    want = grad(lambda p: sum((a * VECTOR[n]).sum() for n, a in plainly(p).items()))(PARAMS)
    with simulate(4):
        sh = TABLES[name].sharding()
        x, p, v = sh.shard(X, "batch seq* embed"), local(sh, PARAMS), local(sh, VECTOR)

        def loss(p):
            return scalar(sh, block(sh.use(p, SPEC), x, Ctx(sh), 2))

        got, found = chunks(lambda: grad(lambda p: sh.inner(grad(loss)(p), v, SPEC))(p))
        assert found.count(2) >= 6, found
        same(tree.leaves(got), tree.leaves(local(sh, want)))
        flat = [t.detach().requires_grad_() for t in tree.leaves(p)]
        gradients = torch.autograd.grad(loss(tree.like(SPEC, flat)), flat, create_graph=True)
        got = torch.autograd.grad(sh.inner(tree.like(SPEC, gradients), v, SPEC), flat)
        same(got, tree.leaves(local(sh, want)))


def test_vmap():
    xs = torch.stack([X, 2 * X, X - 1])
    with simulate(4):
        sh = TABLES["sp"].sharding()
        x, up = torch.stack([sh.shard(t, "batch seq* embed") for t in xs]), sh.shard(PARAMS["up"], "embed mlp")
        f = functools.partial(sh.dot, equation=UP, overlap=2)
        same(torch.func.vmap(f, (0, None))(x, up), torch.stack([f(t, up) for t in x]))
        ups = torch.stack([up, up + 1])
        same(torch.func.vmap(f, (None, 0))(x[0], ups), torch.stack([f(x[0], w) for w in ups]))


def test_the_checking_mode_knows_what_enters():
    rules = Rules({"batch": "dp", "seq": "cp", "seq*": ("cp", "tp"), "embed": None, "mlp": "tp"})
    spec = {n: SPEC[n] for n in ("up", "down")}

    def program(enter=None, overlap=2):
        def loss(p, x, sh):
            p = sh.use(p, spec)
            h = x if enter is None else sh(x, enter)
            y = sh.dot(sh.dot(h, p["up"], UP, overlap=overlap).tanh(), p["down"], DOWN, overlap=overlap)
            return sh.sum(y, "batch seq* embed ->")

        return loss

    dims, params = "batch seq* embed", {n: PARAMS[n] for n in spec}
    for overlap in (0, 2):
        check(program(overlap=overlap), spec, params, X, rules, dims=dims)
    with pytest.raises(ShardingError, match="on on_seq_between the value is"):
        check(program("batch seq* embed -> batch seq embed | mlp"), spec, params, X, rules, dims=dims)
    wrong = {**spec, "up": leaf((D, M), "embed mlp", "batch seq*")}
    with pytest.raises(ShardingError):
        check(lambda p, x, sh: scalar(sh, sh.dot(x, sh.use(p, wrong)["up"], UP, overlap=2)), wrong, params, X, rules, dims=dims)


POLICIES = {"everything": everything, "nothing": nothing, "up and o": names("up", "o"), "all": names(*SPEC)}


@pytest.mark.parametrize("policy", POLICIES)
def test_remat_and_split(policy):
    """Joint and in two halves; the products are tapped: no weight's gradient is made in the first half."""
    with simulate(4):
        sh = TABLES["sp"].sharding()
        want = expected(sh)
        same(run(sh, 2, wrap=lambda f: remat(f, POLICIES[policy])), want)
        p, x = sh.use(local(sh, PARAMS), SPEC), sh.shard(X, "batch seq* embed")
        s = split(functools.partial(block, n=2), POLICIES[policy])
        y, residual = s.forward(p, x, Ctx(sh))
        gx, left = s.backward_input(residual, sh.shard(weight(X), "batch seq* embed"), p)
        assert all(g is None for g in tree.leaves(left.gp)) and len(left.calls) == len(SPEC)
        gp = tree.tree_map(sh.leave, s.backward_weight(left), SPEC)
        same([y, gx, *tree.leaves(gp)], want)


def gathers(sh, wrap):
    """All-gathers of a forward and backward of one product that has one."""
    x, up = (sh.shard(t, n).requires_grad_() for t, n in ((X, "batch seq* embed"), (PARAMS["up"], "embed mlp")))
    f = wrap(lambda p, x, ctx: ctx.sh.dot(x, p["up"], UP, name="up", overlap=2))
    with record_collectives() as found:
        torch.autograd.grad(f({"up": up}, x, Ctx(sh)).sum(), [x, up])
    return [c.elements for c in found if c.kind == "all-gather"]


def test_what_is_gathered_again():
    """For the gradient by the weight, x is; in the second run of a block it is kept; saved by name, that needs none."""
    each = B * S // 4 * D  # elements of x on a rank
    with simulate(4):
        sh = TABLES["sp"].sharding()
        assert gathers(sh, lambda f: f) == [each // 2, each // 2, each]
        assert gathers(sh, lambda f: remat(f, nothing)) == [each // 2] * 4
        assert gathers(sh, lambda f: remat(f, names("up"))) == [each // 2, each // 2, each]
