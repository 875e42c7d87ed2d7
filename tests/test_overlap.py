"""Products whose gather or scatter runs beside them: the same function as whole, and what is issued and awaited when."""

import functools
import time
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


@pytest.mark.parametrize(
    "options", [{"zigzag": {"seq": "tp"}}, {"uneven": {"seq": 15}}], ids=lambda options: next(iter(options))
)
def test_a_sequence_in_no_plain_parts_is_not_cut(options):
    """In zigzag order, or in parts that are filled up: then the batch is cut, and a single row is whole."""
    n, marked = options.get("uneven", {"seq": S})["seq"], "batch seq** embed, embed mlp -> batch seq* mlp"
    x, want = X[:, :n], X[:, :n] @ PARAMS["up"]
    rows = dict.fromkeys(("batch", "embed", "seq*")) | {"mlp": "tp", "seq": "tp", "seq**": "tp"}
    with simulate(2):
        sh = Sharding(make_mesh("tp=2", device="cpu"), Rules(compute=rows, **options), precision=DOUBLE)
        up = sh.shard(PARAMS["up"], "embed mlp")
        for rows, count in ((4, 4), (1, 1)):
            given = sh.shard(x[:rows], "batch seq embed")
            got, found = chunks(lambda: sh.dot(given, up, marked, overlap=4))  # noqa: B023 (used at once)
            assert found == [count]
            same([got], [sh.shard(want[:rows], "batch seq* mlp")])


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

        def of_weight(n):
            h = sh.shard(integers(B, S, M), "batch seq mlp")
            y = sh.dot(h, (w := given[2].detach().requires_grad_()), DOWN, overlap=n)
            return torch.autograd.grad(y, w, sh.shard(integers(B, S, D), "batch seq* embed"))

        for n in (2, 4):
            for got, want in zip([*run(n), *of_weight(n)], [*run(0), *of_weight(0)], strict=True):
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
        check(
            lambda p, x, sh: scalar(sh, sh.dot(x, sh.use(p, wrong)["up"], UP, overlap=2)),
            wrong,
            params,
            X,
            rules,
            dims=dims,
        )


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


# ------------------------------------------------------------------------------------------------ on real processes


class Watched:
    """While open: collectives, products and weights' gradients are noted in `events`; each collective takes `delay`
    seconds, and each product `work`."""

    def __init__(self, delay=0.0, work=0.0):
        self.events, self.delay, self.work, self.under_way, self.count = [], delay, work, {}, 0

    def begin(self, collective, x, mesh, axes):
        y = self.original[0](collective, x, mesh, axes)
        self.events.append(f"begin {collective}")
        self.count += 1
        self.under_way[id(y)] = y, collective, time.monotonic()
        return y

    def end(self, y):
        _, collective, at = self.under_way.pop(id(y))
        time.sleep(max(0.0, at + self.delay - time.monotonic()))
        self.events.append(f"end {collective}")
        return self.original[1](y)

    def working(self, f, what):
        def g(*args, **kwargs):
            self.events.append(what)
            time.sleep(self.work)
            return f(*args, **kwargs)

        return g

    def __enter__(self):
        there = fmegatron.overlap
        self.original = collectives.begin, collectives.end, there.multiply, there.weight_gradient
        collectives.begin, collectives.end = self.begin, self.end
        there.multiply = self.working(there.multiply, "product")
        there.weight_gradient = self.working(there.weight_gradient, "weight")
        return self

    def __exit__(self, *_):
        there = fmegatron.overlap
        collectives.begin, collectives.end, there.multiply, there.weight_gradient = self.original


def two_ranks(rows=B, seq=S, embed=D, mlp=M):
    """(sharding over tp=2 with SP, x, up, down as a rank holds them)."""
    rows_of = {"batch": None, "seq": None, "seq*": "tp", "embed": None, "mlp": "tp"}
    sh = Sharding(make_mesh("tp=2", device="cpu"), Rules(compute=rows_of))
    sizes = {"batch seq* embed": (rows, seq, embed), "embed mlp": (embed, mlp), "mlp embed": (mlp, embed)}
    return sh, [sh.shard(integers(*shape), dims).requires_grad_() for dims, shape in sizes.items()]


def events():
    """Of the forward and backward of a product with a gather, then of one with a scatter, in four chunks."""
    sh, (x, up, down) = two_ranks()
    found = []
    for f, args in ((UP, (x, up)), (DOWN, (sh.dot(x, up, UP).detach().requires_grad_(), down))):
        with Watched() as watched:
            y = sh.dot(*args, f, overlap=4)
        found.append(watched.events)
        with Watched() as watched:
            torch.autograd.grad(y, args, torch.ones_like(y))
        found.append(watched.events)
    return found


def test_collectives_run_beside_the_products():
    """Chunk i + 1 is gathered before the product of chunk i and awaited behind it; the sum of chunk i is awaited behind
    the product of chunk i + 1, and the last one's behind the weight's gradient."""
    b, e = (
        {k: f"{what} {kind}" for k, kind in (("g", "all-gather"), ("s", "reduce-scatter"))} for what in ("begin", "end")
    )
    p, w = "product", "weight"
    gathering = [b["g"], *(b["g"], e["g"], p) * 3, e["g"], p]
    scattering = [p, b["s"], *(p, b["s"], e["s"]) * 3]
    for found in processes(2).run(events):
        assert found[0] == gathering
        assert found[1] == [b["g"], *scattering, e["g"], w, e["s"]]
        assert found[2] == [*scattering, e["s"]]
        assert found[3] == [*gathering, w]


DELAY = 0.03


def seconds(delay, rounds=2):
    """(the least seconds of a forward and backward of both, its collectives)."""
    sh, given = two_ranks()
    took = []
    for _ in range(rounds):
        torch.distributed.barrier()
        with Watched(delay, 1.3 * DELAY) as watched:
            began = time.monotonic()
            y = sh.dot(sh.dot(given[0], given[1], UP, overlap=4), given[2], DOWN, overlap=4)
            torch.autograd.grad(y.sum(), given)
            took.append(time.monotonic() - began)
    return min(took), watched.count


def test_delayed_collectives_are_hidden():
    """All but the first gather of forward and backward, and the last sum of the forward: 3 of 17."""
    quick = max(t for t, _ in processes(2).run(seconds, 0.0))
    slow, counts = zip(*processes(2).run(seconds, DELAY), strict=True)
    assert set(counts) == {17}
    assert max(slow) - quick < 0.3 * 17 * DELAY


class Live(TorchDispatchMode):
    """The most bytes of storages made inside, beside those of `given`, that lived at a time."""

    def __init__(self, given):
        super().__init__()
        self.given = {getattr(t, "elem", t).untyped_storage()._cdata for t in given}
        self.at, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                s = getattr(t, "elem", t).untyped_storage()
                known = s._cdata in self.given or (s._cdata in self.at and not self.at[s._cdata][0].expired())
                if not known:
                    self.at[s._cdata] = StorageWeakRef(s), s.nbytes()
        self.peak = max(self.peak, self.now())
        return out

    def now(self):
        self.at = {k: v for k, v in self.at.items() if not v[0].expired()}
        return sum(n for _, n in self.at.values())


def peaks(n):
    """For either product [bytes at the peak of the forward, behind it, at the peak of the backward]: the least of
    some runs, as gloo's own thread lets go of a buffer a moment after the collective has ended."""
    runs = [once(n) for _ in range(3)]
    return [[min(times) for times in zip(*products, strict=True)] for products in zip(*runs, strict=True)]


def once(n):
    sh, (x, up, down) = two_ranks(8, 16, 24, 40)
    found = []
    for f, args in ((UP, (x, up)), (DOWN, (sh.dot(x, up, UP).detach().requires_grad_(), down))):
        with Live(args) as forward:
            y = sh.dot(*args, f, overlap=n)
        found.append([forward.peak, forward.now()])
        g = torch.ones_like(y)
        with Live(args) as backward:
            grads = torch.autograd.grad(y, args, g)
        found[-1].append(backward.peak)
        del y, g, grads
    return found


def test_memory():
    """Never more than whole and three chunks. Of a gathered operand only chunks are there, and none is kept; of the
    summands of a result too."""
    (up, down), (cut_up, cut_down) = (processes(2).run(peaks, n)[0] for n in (0, 4))
    stream = 4 * 8 * 16 * 24  # bytes of a whole [batch seq embed]
    for whole, cut in ((up, cut_up), (down, cut_down)):
        assert all(c <= w + 3 * stream // 4 for w, c in zip(whole, cut, strict=True)), (whole, cut)
    assert cut_up[1] == up[1] - stream and cut_down[1] == down[1]
    assert cut_up[0] == cut_up[1] + 3 * stream // 4  # one on its way, one that came and that put in order
    assert cut_down[0] < down[0] - stream


def pair(p, x, ctx, n=2):
    h = ctx.sh.dot(x, p["up"], UP, name="up", overlap=n)
    return ctx.sh.dot(h.tanh(), p["down"], DOWN, name="down", overlap=n)


def compiled():
    """The greatest difference of a compiled block from the same without chunks, whole and split."""
    sh, (x, up, down) = two_ranks()
    p, ctx, worst = {"up": up, "down": down}, Ctx(sh), 0.0
    want = pair(p, x, ctx, 0)
    wanted = torch.autograd.grad(want, [x, up, down], torch.ones_like(want))
    f = torch.compile(pair, backend="aot_eager")
    y = f(p, x, ctx)
    for got in (torch.autograd.grad(y, [x, up, down], torch.ones_like(y)), halves(f, p, x, ctx)):
        worst = max(worst, *(float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True)))
    return worst


def halves(f, p, x, ctx):
    s = split(f, names("up"))
    y, residual = s.forward(p, x, ctx)
    gx, left = s.backward_input(residual, torch.ones_like(y), p)
    gp = s.backward_weight(left)
    return gx, gp["up"], gp["down"]


@pytest.mark.slow
def test_compiled_blocks_are_not_cut():
    assert max(processes(2).run(compiled, timeout=300)) < 1e-6
