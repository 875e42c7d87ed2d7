"""Gradients that travel in a narrow dtype and are added in a wide one: errors against the sum in float64."""

import dataclasses

import pytest
import torch

from fmegatron import tree
from fmegatron.accumulate import Term, Weight, accumulate
from fmegatron.collectives import Move, Step, Wire
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.grad import to_local
from fmegatron.initializers import Normal
from fmegatron.mesh import make_mesh
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.recording import record_collectives
from fmegatron.rules import Rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import Param, init
from tests.processes import processes

torch.set_num_threads(1)
pytestmark = pytest.mark.xdist_group("gloo")

RANKS = 8
BF16 = 2.0**-8  # largest relative error of a rounding to bfloat16, and to float32
FP32 = 2.0**-24
NARROW = Precision(wire=torch.bfloat16)

# "a" is cut over ranks where the rules say so, "b" divides by no number of them: its sum is an all-reduce, filled up
SPEC = {
    "layers": {0: {"a": Param((16, 3), "embed mlp", Normal(1.0), over="batch")}},
    "b": Param((11,), "vocab", Normal(1.0), over="batch"),
    "c": Param((5,), "kv", Normal(1.0), over="batch", dtype=torch.float32),
}
SHAPES = {"a": (16, 3), "b": (11,), "c": (5,)}

# name: (axes, options of Rules, how often a term of "a" and what it becomes part of are rounded)
LAYOUTS = {
    "dp": ("dp={n}", {"store": "dp", "zero": 0}, 2),
    "zero 1": ("dp={n}", {"store": "dp", "zero": 1}, 1),
    "zero 2": ("dp={n}", {"store": "dp", "zero": 2}, 1),
    "zero 3": ("dp={n}", {"store": "dp", "zero": 3}, 1),
    "hsdp": ("dp=2,fsdp={h}", {"store": "fsdp"}, 3),
    "hsdp, state over both": ("dp=2,fsdp={h}", {"store": "fsdp", "store_optimizer": "dp"}, 2),
}


def summands(ranks=RANKS):
    """{leaf: float32[ranks, …]}: each rank's gradient. A large one in front of small ones that bfloat16 cannot add to it."""
    g = torch.Generator().manual_seed(0)
    found = {n: torch.rand(ranks, *shape, generator=g) + 0.01 for n, shape in SHAPES.items()}
    for x in found.values():
        x.view(ranks, -1)[:, 0] = torch.tensor([256.0] + [1.0] * (ranks - 1))
    return found


def loss(p, batch, ctx):
    """Its gradient is the sum of the batch's rows."""
    w = ctx.sh.use({"a": p["layers"][0]["a"], "b": p["b"], "c": p["c"]}, {"a": A, "b": SPEC["b"], "c": SPEC["c"]})
    return Term(sum((batch[n] * w[n]).flatten(1).sum(1) for n in w), "batch"), None


A = SPEC["layers"][0]["a"]


def gradients(layout, precision, terms):
    """{leaf: its sum, as every rank of this process has it} of a layout."""
    axes, options, _ = LAYOUTS[layout]
    ranks = len(terms["a"])
    mesh = make_mesh(axes.format(n=ranks, h=ranks // 2), device="cpu")
    rows = {"batch": ("dp", "fsdp") if "fsdp" in axes else "dp", **dict.fromkeys(("embed", "mlp", "vocab", "kv"))}
    sh = Sharding(mesh, Rules(rows, **options), precision=precision)
    batch = {n: sh.shard(x, "batch " + {"a": "embed mlp", "b": "vocab", "c": "kv"}[n]) for n, x in terms.items()}
    f = accumulate(loss, weights=lambda batch: {"loss": Weight(1.0)}, spec=SPEC)
    _, found = f(init(SPEC, key(0), sh=sh), batch, Ctx(sh=sh))
    found = {"a": found["layers"][0]["a"], "b": found["b"], "c": found["c"]}
    assert {to_local(g).dtype for g in found.values()} == {torch.float32}
    return {n: per_rank(g.full_tensor()) for n, g in found.items()}


def simulated(layout, precision):
    terms = summands()  # outside of the simulation, where each rank would draw its own
    with simulate(RANKS):
        return gradients(layout, precision, terms)


def errors(found, name):
    """|sum - sum in float64|, and the sum of magnitudes: [elements] each."""
    terms = summands()[name].double()
    assert all(torch.equal(x, found[name][0]) for x in found[name])  # on every rank
    return (found[name][0].double() - terms.sum(0)).abs(), terms.abs().sum(0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_error_is_one_rounding_of_each_term(layout):
    """Summands are rounded once a stage, and a sum that all ranks get once more; the sums themselves are float32's. Each of the
    k roundings and RANKS - 1 additions on a term's way has a factor of at most 1 + u: the error is at most their product
    less 1, times the sum of magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2)."""
    rounded, times = simulated(layout, NARROW), LAYOUTS[layout][2]
    summed = simulated(layout, Precision(reduce=torch.bfloat16))
    for name, k in (("a", times), ("b", 2)):
        error, size = errors(rounded, name)
        assert (error <= ((1 + BF16) ** k * (1 + FP32) ** (RANKS - 1) - 1) * size).all()
        assert error.max() > 0
        other, _ = errors(summed, name)
        assert error.norm() < (0.3 if k == 1 else 0.8) * other.norm()
    error, size = errors(rounded, "c")  # a leaf with a dtype of its own is not rounded
    assert (error <= ((1 + FP32) ** (RANKS - 1) - 1) * size).all()


def test_small_terms_count_beside_a_large_one():
    """256 and seven times 1 are 263, where every partial sum in bfloat16 is 256."""
    assert simulated("zero 1", NARROW)["a"][0][0, 0] == 263
    assert simulated("dp", NARROW)["a"][0][0, 0] == 264  # rounded for all ranks
    assert simulated("zero 1", Precision(reduce=torch.bfloat16))["a"][0][0, 0] == 256


@pytest.mark.parametrize("layout", ["dp", "zero 3"])
def test_processes_give_what_the_simulation_gives(layout):
    terms = summands(4)
    with simulate(4):
        want = gradients(layout, NARROW, terms)
    for found in processes(4).run(gradients, layout, NARROW, terms):
        for name in ("a", "b"):  # bitwise: pieces are added in the order of the ranks
            assert torch.equal(found[name][0], want[name][0])


def test_it_is_the_dual_of_a_gather_for_second_derivatives_too():
    """In float64: forward and backward of the sum are those of the network's own."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double()
    found = []
    with simulate(4):
        mesh = make_mesh("dp=4", device="cpu")
        for wire in (None, Wire(torch.float64, torch.float64)):
            steps = (Step("P>S", ("dp",), (), ((0, ("dp",)),), wire=wire), Step("S>R", ("dp",), ((0, ("dp",)),), ()))
            here = x * (1 + mesh.position(("dp",)))
            y = Move.apply(here.requires_grad_(), mesh, tuple(s._replace(wire=wire) for s in steps), (None, None, None))
            (g,) = torch.autograd.grad(y.pow(3).sum(), here, create_graph=True)
            (h,) = torch.autograd.grad(g.square().sum(), here)
            found.append([per_rank(t) for t in (y.detach(), g.detach(), h)])
    for a, b in zip(tree.leaves(found[0]), tree.leaves(found[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-13)


def test_what_goes_over_the_network_is_narrow():
    with record_collectives() as found:
        simulated("hsdp", NARROW)
    sent = {(c.kind, c.axes, c.elements) for c in found if c.dtype == torch.bfloat16}
    a, b = 48 // 4, 16  # a rank's part of "a"; "b", filled up to a multiple of 8
    assert sent == {
        ("all-to-all", ("fsdp",), 48),
        *((kind, ("dp",), a // n) for kind, n in (("all-to-all", 1), ("all-gather", 2))),
        *((kind, ("dp", "fsdp"), b // n) for kind, n in (("all-to-all", 1), ("all-gather", 8))),
    }
    assert not [c for c in found if c.kind == "reduce-scatter"]


def test_a_wire_that_means_nothing_is_refused():
    with pytest.raises(UserError, match="wire=float32 does not fit into reduce=bfloat16"):
        Precision(reduce=torch.bfloat16, wire=torch.float32)
    with pytest.raises(UserError, match="wire=float16 is for fp16 products"):
        Precision(wire=torch.float16)
    assert dataclasses.replace(Precision(compute=torch.float16), wire=torch.float16).reduce_dtype is torch.float32
