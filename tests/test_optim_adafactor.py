"""Adafactor against transformers.optimization.Adafactor; statistics of the global matrix on sharded leaves."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.optimization import Adafactor

from fmegatron import tree
from fmegatron.errors import UserError
from fmegatron.optim import adafactor, dims, leaves, norm, per_leaf
from fmegatron.simulation import lift, per_rank, simulate
from fmegatron.spec import Param
from tests.optim_trees import Count, cloned, close, made, ours, placed, same, same_on_ranks, simulated_mesh

SHAPES = {"table": (6, 10), "norm": (5,), "deep": {"three": (3, 4, 6), "scalar": ()}}
OPTIONS = {
    "relative": ({}, {}),
    "warmup": ({"warmup_init": True}, {"warmup_init": True}),
    "rate": ({"lr": 0.03, "relative_step": False}, {"lr": 0.03}),
    "plain": (
        {"lr": 0.03, "relative_step": False, "scale_parameter": False},
        {"lr": 0.03, "scale_parameter": False},
    ),
    "mean": ({"beta1": 0.9, "weight_decay": 0.1}, {"beta1": 0.9, "weight_decay": 0.1}),
    "numbers": (
        {"clip_threshold": 0.5, "decay_rate": -0.6, "eps": (1e-10, 0.3)},
        {"clip_threshold": 0.5, "beta2_decay": -0.6, "eps": (1e-10, 0.3)},
    ),
}
each_option = pytest.mark.parametrize(("their", "our"), OPTIONS.values(), ids=OPTIONS)

R, S = Replicate(), Shard


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def theirs(params, gradients, **options):
    held = [torch.nn.Parameter(p.clone()) for p in tree.leaves(params)]
    peer = Adafactor(held, **options)
    for grads in gradients:
        for p, g in zip(held, tree.leaves(grads), strict=True):
            p.grad = g.clone()
        peer.step()
    return tree.like(params, [p.detach() for p in held]), tree.like(params, [peer.state[p] for p in held])


@each_option
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_to_transformers(their, our, dtype):
    params, gradients = made(0, dtype, SHAPES), [made(i, dtype, SHAPES) for i in range(1, 7)]
    gradients[2] = tree.tree_map(lambda g: g * 100, gradients[2])  # one that is clipped
    want, state = theirs(params, gradients, **their)
    for donate in (False, True):
        got, mine = ours(adafactor(**our), params, gradients, donate)
        close(got, want, 1e-12 if dtype == torch.float64 else 1e-5)
    assert mine["count"] == 6
    torch.testing.assert_close(mine["rows"]["table"], state["table"]["exp_avg_sq_row"], rtol=1e-5, atol=0)
    torch.testing.assert_close(mine["columns"]["table"], state["table"]["exp_avg_sq_col"], rtol=1e-5, atol=0)
    torch.testing.assert_close(mine["v"]["norm"], state["norm"]["exp_avg_sq"], rtol=1e-5, atol=0)


def test_bfloat16_parameters_equal_transformers():
    params, gradients = made(0, torch.bfloat16, SHAPES), [made(i, torch.bfloat16, SHAPES) for i in range(1, 4)]
    want, _ = theirs(params, gradients)
    got, state = ours(adafactor(), params, gradients)
    close(got, want, 2e-2)
    assert state["rows"]["table"].dtype == torch.float32


def test_memory_is_that_of_rows_and_columns():
    state = adafactor().init(made(0, shapes=SHAPES))
    sizes = {path: x.numel() for path, x in tree.named(state).items() if isinstance(x, torch.Tensor)}
    assert sizes == {
        "rows.table": 6,
        "columns.table": 10,
        "rows.deep.three": 12,
        "columns.deep.three": 18,
        "v.norm": 5,
        "v.deep.scalar": 1,
    }
    assert set(adafactor(beta1=0.9).init(made(0, shapes=SHAPES))) == {"count", "rows", "columns", "v", "m"}
    half = adafactor(beta1=0.9, moments=(torch.bfloat16, torch.float64)).init({"a": torch.zeros(2, 3)})
    assert half["m"]["a"].dtype == torch.bfloat16 and half["rows"]["a"].dtype == torch.float64


# Matrices by the dims of a spec

SPEC = {
    "q": Param((8, 4, 2, 4), "embed kv group head"),
    "o": Param((4, 2, 4, 8), "kv group head embed"),
    "gate": Param((8, 16), "embed mlp"),
    "experts": Param((4, 8, 16), "expert embed mlp"),
    "norm": Param((8,), "embed"),
    "bias": Param((4, 4), "kv head"),
}
FLAT = {"q": (8, 32), "o": (32, 8), "gate": (8, 16), "experts": (4, 8, 16), "norm": (8,), "bias": (16,)}


def values(seed, dtype=torch.float64):
    return made(seed, dtype, {n: p.shape for n, p in SPEC.items()})


def flat(t):
    return {n: x.reshape(FLAT[n]) for n, x in t.items()}


@pytest.mark.parametrize("options", [{}, {"beta1": 0.9, "weight_decay": 0.1}])
def test_matrices_by_dims(options):
    """What transformers does to the same parameters reshaped to matrices."""
    params, gradients = values(0), [values(i) for i in range(1, 5)]
    want, _ = theirs(flat(params), [flat(g) for g in gradients], **options)
    got, state = ours(adafactor(spec=SPEC, **options), params, gradients)
    close(flat(got), want, 1e-12)
    assert state["rows"]["q"].shape == (8,) and state["columns"]["q"].shape == (4, 2, 4)
    assert state["rows"]["experts"].shape == (4, 8) and state["v"]["bias"].shape == (4, 4)


LAYOUTS = {
    "one axis": {"q": (R, S(1), R), "o": (R, S(0), R), "gate": (R, S(1), R), "experts": (R, S(0), R), "norm": (R, R, R),
                 "bias": (R, S(0), R)},
    "two axes": {"q": (S(1), S(2), S(0)), "o": (S(0), S(1), S(3)), "gate": (S(1), S(1), S(0)),
                 "experts": (S(0), S(2), S(1)), "norm": (R, R, S(0)), "bias": (S(0), R, S(1))},
    "one dim": {"q": (S(0), S(0), S(0)), "o": (S(3), S(3), S(3)), "gate": (S(1), S(1), S(1)),
                "experts": (S(2), S(2), S(2)), "norm": (S(0), S(0), S(0)), "bias": (S(0), S(0), R)},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_sharded_equals_one_device(layout):
    params, gradients = values(0), [values(i) for i in range(1, 4)]
    optimizer = adafactor(spec=SPEC, beta1=0.9, weight_decay=0.1, clip_threshold=0.5)
    want, state = ours(optimizer, params, gradients)
    with simulate(8):
        mesh = simulated_mesh(2, 2, 2)
        p = placed(params, mesh, layout)
        s = optimizer.init(p)
        for donate, grads in zip((False, True, True), gradients, strict=True):
            before = cloned(p)
            q, _, s = optimizer.update(p, placed(grads, mesh, layout), s, donate=donate)
            if not donate:
                same_on_ranks(p, before)
            p = q
        same_on_ranks(p, placed(want, mesh, layout), 1e-12)
        same_on_ranks(s["m"], placed(state["m"], mesh, layout), 1e-12)
        for name in ("rows", "columns", "v"):
            for path, x in s[name].items():
                if x is not None:
                    assert isinstance(x, DTensor) and x.shape == state[name][path].shape
                    full = placed({"x": state[name][path]}, mesh, {"x": x.placements})["x"]
                    same_on_ranks({path: x}, {path: full}, 1e-12)


def test_statistics_keep_the_axes_of_their_dims():
    with simulate(8):
        s = adafactor(spec=SPEC).init(placed(values(0), simulated_mesh(2, 2, 2), LAYOUTS["two axes"]))
        assert s["rows"]["q"].placements == (R, R, S(0)) and s["columns"]["q"].placements == (S(0), S(1), R)
        assert s["rows"]["experts"].placements == (S(0), R, S(1))
        assert [x.shape for x in per_rank(lift(s["columns"]["q"].to_local(), 8))] == [(2, 1, 4)] * 8


def test_collectives_do_not_scale_with_leaves(monkeypatch):
    from torch.distributed import _functional_collectives as collectives

    def calls(n):
        made_calls = []
        original = collectives.all_reduce
        with monkeypatch.context() as m:
            m.setattr(collectives, "all_reduce", lambda *a, **k: made_calls.append(a[2][1]) or original(*a, **k))
            with simulate(8):
                p = {str(i): torch.randn(8, 8) for i in range(n)}
                p = placed(p, simulated_mesh(2, 2, 2), dict.fromkeys(p, (S(0), S(1), R)))
                optimizer = adafactor()
                optimizer.update(p, p, optimizer.init(p))
        return made_calls

    # rows and columns over both axes, the mean of rows over the rows' axis, root mean squares of parameters and updates
    assert calls(1) == calls(9) == [0, 1, 0, 0, 1, 0, 1]
    assert norm.summed([], []) == []


# As the other optimizers


@pytest.mark.parametrize("moments", [None, torch.bfloat16])
def test_donation_changes_nothing_but_the_buffers(moments):
    params, grads = values(0, torch.float32), values(1, torch.float32)
    params |= {"gate": params["gate"].bfloat16(), "none": None, "frozen": torch.randn(3, 2), "t": torch.randn(5, 4).t()}
    grads |= {"none": None, "frozen": None, "t": torch.randn(4, 5)}
    optimizer = adafactor(beta1=0.9, moments=moments)
    _, _, state = optimizer.update(params, grads, optimizer.init(params))
    kept = cloned((params, grads, state))
    first = optimizer.update(params, grads, state)
    same((params, grads, state), kept)
    given = {id(x) for x in tree.leaves((params, grads, state)) if isinstance(x, torch.Tensor)}
    donated = optimizer.update(params, grads, state, donate=True)
    same(donated, first)
    assert all(id(x) in given for x in tree.leaves(donated) if isinstance(x, torch.Tensor))
    assert torch.equal(donated[0]["frozen"], kept[0]["frozen"])


def test_temporaries_are_a_leaf():
    params, grads = ({str(i): torch.randn(16, 16) for i in range(20)} for _ in range(2))
    optimizer = adafactor()
    state = optimizer.init(params)
    with Count() as count:
        optimizer.update(params, grads, state, donate=True)
    assert count.largest <= 20 * 32  # a leaf's 256 elements; the rows and columns of all leaves go together


def test_an_ensemble_by_vmap(monkeypatch):
    optimizer = adafactor(beta1=0.9, weight_decay=0.1)
    rows = [tree.leaves(values(i)) for i in range(3)]

    def twice(*flat):
        p = tree.like(SPEC, flat)
        state = optimizer.init(p)
        for _ in range(2):
            p, _, state = optimizer.update(p, tree.tree_map(lambda x: x.sin(), p), state)
        return tuple(tree.leaves(p))

    got = torch.func.vmap(twice)(*[torch.stack(column) for column in zip(*rows, strict=True)])
    for i, row in enumerate(rows):
        for x, want in zip(got, twice(*row), strict=True):
            torch.testing.assert_close(x[i], want, rtol=1e-11, atol=1e-11)
    params, grads = values(0), values(1)
    want, _ = ours(optimizer, params, [grads])
    monkeypatch.setattr(leaves, "plain_only", lambda: True)
    close(ours(optimizer, params, [grads])[0], want, 1e-12)


def test_rates_and_decay_by_leaf():
    params, gradients = values(0), [values(i) for i in range(1, 4)]
    scale = per_leaf(SPEC, 1.0, {dims("*mlp*"): 0.25})
    decay = per_leaf(SPEC, 0.1, {"norm": 0.0})
    got, _ = ours(adafactor(0.1, spec=SPEC, lr_scale=scale, weight_decay=decay), params, gradients)
    for n in SPEC:
        lr = 0.025 if n in ("gate", "experts") else 0.1
        wd = 0.0 if n == "norm" else 0.1
        one, many = {n: flat(params)[n]}, [{n: flat(g)[n]} for g in gradients]
        want, _ = theirs(one, many, lr=lr, weight_decay=wd, relative_step=False, scale_parameter=True)
        torch.testing.assert_close(flat(got)[n], want[n], rtol=1e-12, atol=1e-12)


def test_rate_is_reported():
    assert adafactor().rate(0) == 1e-2 and adafactor().rate(39_999) == 1 / 200
    assert adafactor(warmup_init=True).rate(9) == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: adafactor(-1.0), "lr=-1.0"),
        (lambda: adafactor(eps=(-1.0, 1e-3)), "eps=-1.0"),
        (lambda: adafactor(clip_threshold=0.0), "clip_threshold"),
        (lambda: adafactor(beta2_decay=0.8), "beta2_decay=0.8"),
        (lambda: adafactor(beta1=1.0), "beta1=1.0"),
        (lambda: adafactor(0.1, warmup_init=True), "warmup_init"),
        (lambda: adafactor(matrices={"a": "b -> c"}), "spec="),
    ],
)
def test_errors(make, part):
    with pytest.raises(UserError) as error:
        make()
    assert part in str(error.value)
