"""Mesh, rules, specs and what `sh` says of itself: placements, explanations, and errors that name what is wrong."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from fmegatron import tree
from fmegatron.errors import ShardingError, UserError
from fmegatron.initializers import ones
from fmegatron.mesh import everywhere, make_mesh
from fmegatron.placements import Invariant, Partial, Replicate, Shard
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.rules import Rules
from fmegatron.sharding import Sharding, placements
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import Param, abstract, count, describe, init, sizes
from tests.processes import processes

RULES = Rules(
    {"batch": "dp", "seq": None, "seq*": "tp", "embed": None, "mlp": "tp", "head": None},
    store="dp",
    activations=("batch", "seq", "head"),
)


def mesh_of(text, **options):
    return make_mesh(text, abstract=True, device="cpu", **options)


# ------------------------------------------------------------------------------------------------------------------ mesh


def test_a_mesh_is_the_common_refinement_of_its_factorings():
    mesh = mesh_of("dp=4,tp=2", also=["edp=2,ep=4"])
    assert list(mesh.sizes.values()) == [2, 2, 2]
    assert mesh.size(mesh.expand("dp")) == 4 and mesh.size(mesh.expand("ep")) == 4
    assert (
        mesh.expand("dp")[1] == mesh.expand("ep")[0]
        and mesh.expand("ep")[1] == "tp"
        and mesh.expand("edp") == mesh.expand("dp")[:1]
    )
    mesh = mesh_of("dp=2,tp=8", kv_heads=2)
    assert dict(mesh.sizes) == {"dp": 2, "tp_kv": 2, "tp_group": 4} and mesh.expand("tp") == ("tp_kv", "tp_group")
    assert mesh.order == ("tp_kv", "tp_group", "dp")  # the data axis is the inner split of a dim that both cut
    assert mesh_of("dp=2,tp=2", kv_heads=3).expand("tp_kv") == ("tp_kv",)
    assert dict(make_mesh(dp=1, tp=1, device="cpu").sizes) == {"dp": 1, "tp": 1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mesh_of("dp=2,tp"), "'tp' is not \"axis=size\""),
        (lambda: mesh_of("dp=2,dp=2"), "'dp' twice"),
        (lambda: mesh_of("dp=0"), "1 or more"),
        (lambda: make_mesh("dp=2,tp=2", device="cpu"), "4 ranks but this program runs on 1"),
        (lambda: mesh_of("dp=4,tp=2", also=["ep=3"]), "3 ranks"),
        (lambda: mesh_of("dp=6,tp=2", also=["a=4,b=3"]), "no common refinement"),
        (lambda: mesh_of("dp=2", order=("tp",)), "order"),
        (lambda: mesh_of(""), "empty"),
    ],
)
def test_a_bad_mesh_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


# ----------------------------------------------------------------------------------------------------------- rules, specs


def test_typos_never_mean_unsharded():
    mesh = mesh_of("dp=2,tp=2")
    with pytest.raises(ShardingError, match="no mesh axis is named 'tq'.*did you mean 'tp'"):
        Sharding(mesh, Rules({"mlp": "tq"}))
    with pytest.raises(ShardingError, match="store='ddp'.*did you mean 'dp'"):
        Sharding(mesh, Rules({"mlp": "tp"}, store="ddp"))
    sh = Sharding(mesh, RULES)
    with pytest.raises(ShardingError, match="no row for dim 'embedd'.*did you mean 'embed'"):
        sh.placements("batch seq embedd")
    with pytest.raises(ShardingError, match="rule 'mlpp' is for a dim that no parameter has.*did you mean 'mlp'"):
        placements(
            {"w": Param((4, 4), "embed mlp")},
            mesh,
            Rules({**RULES.compute, "mlpp": None}, activations=RULES.activations),
        )
    with pytest.raises(ShardingError, match="'tp' would shard both 'mlp' and 'seq"):
        sh.placements("mlp seq*")


def test_a_shape_must_agree_with_its_dims():
    with pytest.raises(ShardingError, match=r"\(4, 4\) has 2 dims, but dims 'embed' names 1"):
        Param((4, 4), "embed")
    with pytest.raises(ShardingError, match="names a dim twice"):
        Param((4, 4), "embed embed")
    with pytest.raises(ShardingError, match="1 or more"):
        Param((4, 0), "embed mlp")
    with pytest.raises(ShardingError, match="dim 'embed' has size 4 in 'a' and 5 in 'b.0'"):
        sizes({"a": Param((4,), "embed"), "b": {0: Param((5,), "embed")}})
    with pytest.raises(UserError, match="'a' is a int"):
        sizes({"a": 3})


def test_sizes_that_do_not_divide_are_refused_with_the_sizes():
    sh = Sharding(mesh_of("dp=2,tp=4"), RULES)
    with pytest.raises(ShardingError, match="parameter 'w': dim 'mlp' of size 6 .*does not divide by 4.*tp"):
        sh.check_spec({"w": Param((4, 6), "embed mlp", over="batch seq")})
    with pytest.raises(ShardingError, match="dim 'batch' of size 7 does not divide by 2"):
        sh.local_size("batch", 7)
    with simulate(4):
        sh = Sharding(make_mesh("dp=1,tp=4", device="cpu"), RULES)
        with pytest.raises(ShardingError, match="size 6 .*does not divide by 4.*tp"):
            sh(everywhere(sh.mesh, torch.ones(2, 6, 4)), "batch seq embed -> batch seq* embed")
    assert Sharding(mesh_of("dp=3,tp=1"), RULES).stored_shape(Param((4, 5), "embed mlp")) == (4, 5)  # store: nowhere


def test_equations_are_checked():
    sh = Sharding(mesh_of("dp=2,tp=2"), RULES)
    x = torch.ones(2, 2, 2)
    for equation, message in {
        "batch seq embed": "no equation",
        "batch seq embed -> batch seq": "only moves",
        "batch seq -> batch seq*": "names 2 dims",
        "batch seq embed | mlp -> batch seq embed": "belongs behind the arrow",
    }.items():
        with pytest.raises(ShardingError, match=message):
            sh(x, equation)
    with pytest.raises(ShardingError, match="R -> S on mesh axis 'tp' has no arrow"):
        sh(x, tp=(Replicate(), Shard(1)))
    with pytest.raises(ShardingError, match="in one operand only"):
        sh.dot(x, x, "batch seq* embed, embed head seq -> batch head seq")
    with pytest.raises(ShardingError, match="in no operand"):
        Sharding().dot(x, x[0], "batch seq embed, embed mlp -> batch seq head")
    with pytest.raises(ShardingError, match="3 dims, the tensor of shape .2, 2. has 2"):
        sh.dot(x[0], x[0], "batch seq embed, embed mlp -> batch seq mlp")


def test_store_goes_on_the_largest_free_dim_else_behind_a_sharded_one():
    sh = Sharding(mesh_of("dp=2,tp=2"), RULES)
    assert sh.stored_placements(Param((8, 4), "embed mlp")) == [Shard(1), Shard(0)]
    assert sh.stored_placements(Param((3, 4), "embed mlp")) == [Shard(1), Shard(1)]  # tp, then dp inside
    assert sh.stored_placements(Param((3,), "embed")) == [Replicate(), Replicate()]
    assert placements({"w": Param((8, 4), "embed mlp")}, sh.mesh, RULES) == {"w": (Shard(1), Shard(0))}


def test_describe_shows_placements_and_bytes():
    spec = {"w": Param((8, 4), "embed mlp", over="batch seq"), "n": Param((8,), "embed", ones(), over="batch seq*")}
    table = describe(spec, sh=Sharding(mesh_of("dp=2,tp=2"), RULES))
    row = next(line for line in table.splitlines() if line.startswith("w "))
    assert "8×4" in row and "tp:S(1), dp:S(0)" in row and row.endswith("32") and "40" in table.splitlines()[-1]
    assert count(spec) == 40


def test_init_is_the_same_on_every_mesh_and_abstract_has_its_shape():
    spec = {"w": Param((8, 4), "embed mlp", over="batch seq"), "n": Param((8,), "embed", ones(), over="batch seq*")}
    whole = init(spec, key(3))
    assert torch.equal(whole["w"], init({"w": spec["w"]}, key(3))["w"])  # another leaf changes nothing
    with simulate(4):
        sh = Sharding(make_mesh("dp=2,tp=2", device="cpu"), RULES)
        made, shapes = init(spec, key(3), sh=sh), abstract(spec, sh=sh)
        for name, p in spec.items():
            assert isinstance(made[name], DTensor) and made[name].shape == shapes[name].shape == torch.Size(p.shape)
            assert made[name].placements == shapes[name].placements and shapes[name].to_local().is_meta
            want = per_rank(sh.local(sh.shard_param(whole[name], p)))
            got = per_rank(made[name].to_local())
            assert all(torch.equal(a, b) for a, b in zip(got * (len(want) // len(got)), want, strict=True))


# ---------------------------------------------------------------------------------------------------- names and placements


def blocks(sh, by_names):
    """One MLP written twice: by names and rules, and by placements per mesh axis."""

    def names(p, x):
        h = sh(x, "batch seq* embed -> batch seq embed | mlp")
        h = sh.dot(h, p["up"], "batch seq embed, embed mlp -> batch seq mlp").tanh()
        return sh.dot(h, p["down"], "batch seq mlp, mlp embed -> batch seq* embed")

    def places(p, x):
        h = sh(x, tp=(Shard(1), Replicate()))
        h = sh.dot(h, p["up"], "batch seq embed, embed mlp -> batch seq mlp").tanh()
        return sh(sh.dot(h, p["down"], "batch seq mlp, mlp embed -> batch seq embed"), tp=(Partial(), Shard(1)))

    return names if by_names else places


def test_placements_and_names_are_the_same():
    """Parameters and activations by rules and by placements: same layout, same values, same gradients."""
    shapes = {"up": ((4, 8), "embed mlp"), "down": ((8, 4), "mlp embed")}
    by_rule = {n: Param(s, d, over="batch seq") for n, (s, d) in shapes.items()}
    by_hand = {
        n: Param(s, d, over="batch seq", placements={"tp": Shard(d.split().index("mlp"))})
        for n, (s, d) in shapes.items()
    }
    double = Precision(params=torch.float64)
    values = init(by_rule, key(0), sh=Sharding(precision=double))
    x0 = torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    results = []
    with simulate(4):
        mesh = make_mesh("dp=2,tp=2", device="cpu")
        unruled = Rules({**RULES.compute, "mlp": None}, RULES.store, RULES.activations)
        for spec, rules, names in ((by_rule, RULES, True), (by_hand, unruled, False)):
            sh = Sharding(mesh, rules, precision=double)
            assert placements(spec, mesh, rules) == placements(by_rule, mesh, RULES)
            p = {n: sh.local(sh.shard_param(values[n], spec[n])).requires_grad_() for n in spec}
            x = sh.shard(x0, "batch seq* embed")
            y = blocks(sh, names)(sh.use(p, spec), x)
            loss = sh.sum(y * y, "batch seq* embed ->")
            grads = torch.autograd.grad(loss, [p["up"], p["down"]])
            results.append([per_rank(t.detach()) for t in (loss, *grads)])
    for a, b in zip(*results, strict=True):
        assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def test_placements_are_first_class():
    sh = Sharding(mesh_of("dp=2,tp=2"), RULES)
    assert sh.axis_order == ("tp", "dp")
    assert sh.placements("batch seq* embed") == [Shard(1), Shard(0)]
    assert [repr(p) for p in sh.placements("batch seq embed")] == ["Invariant()", "Shard(dim=0)"]
    assert sh.placements("batch seq embed | mlp")[0] == Replicate()
    with pytest.raises(ShardingError, match=r"Shard\(3\) of a tensor of 2 dims"):
        sh(torch.ones(2, 2), tp=(Invariant(), Shard(3)))
    with pytest.raises(ShardingError, match="give .source, target."):
        sh(torch.ones(2, 2), tp=Shard(1))


def test_explain_tells_operands_and_collectives():
    sh = Sharding(mesh_of("dp=2,tp=2"), RULES)
    text = sh.explain("batch seq mlp, mlp embed -> batch seq* embed", batch=4, seq=8, mlp=16, embed=4)
    assert "local product: tp:P" in text and "4×4 a rank" not in text.splitlines()[0]
    assert "forward: reduce-scatter over tp (P -> S, 2 ranks), 32 elements sent by each rank (ring)" in text
    assert "backward: all-gather over tp (S -> R, 2 ranks), 32 elements sent by each rank (ring)" in text
    enter = sh.explain("batch seq embed -> batch seq embed | mlp")
    assert "forward: nothing over tp (I -> R, 2 ranks)" in enter and "backward: all-reduce over tp" in enter
    assert "plain mathematics" in Sharding().explain("batch seq -> batch seq")


def test_an_axis_of_size_one_costs_nothing():
    sh = Sharding(make_mesh("dp=1,tp=1", device="cpu"), RULES)
    x = torch.ones(2, 2, 4, requires_grad=True)
    assert sh(x, "batch seq* embed -> batch seq embed | mlp") is x
    w = torch.ones(4, 8)
    assert sh.use(w, Param((4, 8), "embed mlp", over="batch seq")) is w
    assert sh.sum(x, "batch seq* embed -> batch seq* embed") is x
    assert type(init({"w": Param((4, 8), "embed mlp", over="batch seq")}, key(0), sh=sh)["w"]) is torch.Tensor


# -------------------------------------------------------------------------------------------------------- arrows, adjoint


def adjoint(kind):
    """<A x, g> = <x, A' g> for every pair of dims and orders of axes, on real ranks; and the second order: d<A'g, v>/dg = A v.

    The pairing of dual types sums over ranks for S, P and R, and takes one rank for I.
    """
    import torch.distributed as dist

    from fmegatron.collectives import DUAL, Move, Step

    mesh = make_mesh("a=2,b=2", device="cpu")
    rank = dist.get_rank()
    s, d = kind[0], kind[2]
    cuts = {
        (): (4, 8, 2),
        ((0, ("b", "a")),): (1, 8, 2),
        ((1, ("a", "b")),): (4, 2, 2),
        ((0, ("a",)), (1, ("b",))): (2, 4, 2),
    }

    def value(what, shape, seed):
        seed = seed if what in "RI" else seed + 10 * rank
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def pair(x, y, what):
        total = (x * y).sum() / (4 if what == "I" else 1)
        dist.all_reduce(total)
        return float(total)

    dual_type, worst, tried = dict(S="S", P="R", R="P", I="I"), 0.0, 0
    for leaves in [c for c in cuts if bool(c) == (s == "S")]:
        for enters in [c for c in cuts if bool(c) == (d == "S")]:
            if {i for i, _ in leaves} & {i for i, _ in enters}:
                continue
            steps = (Step(kind, ("a", "b"), leaves, enters),)
            x = value(s, cuts[leaves], 1).requires_grad_()
            g = value(dual_type[d], cuts[enters], 2).requires_grad_()
            y = Move.apply(x, mesh, steps, (None, None, None))
            (back,) = torch.autograd.grad(y, x, g, create_graph=True)
            worst = max(worst, abs(pair(y.detach(), g.detach(), d) - pair(x.detach(), back.detach(), s)))
            v = value(s, cuts[leaves], 3)
            (again,) = torch.autograd.grad(back, g, v)
            worst = max(worst, float((again - Move.apply(v, mesh, steps, (None, None, None))).abs().max()))
            tried += 1
    assert kind in DUAL
    return worst, tried


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("kind", ["S>R", "P>S", "S>I", "I>S", "I>R", "P>I", "P>R", "S>S"])
def test_every_arrow_is_the_adjoint_of_its_dual(kind):
    for worst, tried in processes(4).run(adjoint, kind):
        assert worst < 1e-12 and tried


def not_overwritten():
    from fmegatron.collectives import all_reduce

    mesh = make_mesh("tp=4", device="cpu")
    x = torch.ones(3)
    y = all_reduce(x, mesh, ("tp",))
    return torch.equal(x, torch.ones(3)) and torch.equal(y, torch.full((3,), 4.0)), tree.is_tensor(y)


@pytest.mark.xdist_group("gloo")
def test_a_collective_leaves_its_input_alone():
    assert processes(4).run(not_overwritten) == [(True, True)] * 4
