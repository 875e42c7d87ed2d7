"""Rates and decay by leaf, against torch's parameter groups; the moving average of weights against torch's."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from fmegatron import tree
from fmegatron.errors import UserError
from fmegatron.optim import adam, adamw, chain, dims, ema, ema_params, lion, muon, per_leaf, sgd, with_master
from fmegatron.simulation import simulate
from fmegatron.spec import Param
from tests.optim_trees import Count, close, made, ours, placed, same, same_on_ranks, simulated_mesh

SPEC = {
    "embed": Param((7, 5), "vocab embed"),
    "layers": {
        i: {"norm": Param((5,), "embed"), "q": Param((5, 3, 2), "embed kv head"), "up": Param((5, 4), "embed mlp")}
        for i in range(11)
    },
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def values(seed, dtype=torch.float64):
    flat = made(seed, dtype, {n: p.shape for n, p in tree.named(SPEC).items()})
    return tree.like(SPEC, [flat[n] for n in tree.paths(SPEC)])


# Values by leaf


def test_patterns():
    found = tree.named(
        per_leaf(
            SPEC,
            1.0,
            {
                "layers.*": 2.0,
                "layers.1.*": 3.0,
                "layers.*.up": 4.0,
                dims("embed kv *"): 5.0,
                lambda path, p: path == "layers.4.q": 6.0,
                "embed": lambda p: 1 / p.shape[1],
            },
        )
    )
    assert found["embed"] == 0.2 and found["layers.0.norm"] == 2.0
    assert found["layers.1.norm"] == 3.0 and found["layers.10.norm"] == 2.0
    assert found["layers.1.up"] == 4.0 and found["layers.1.q"] == 5.0 and found["layers.4.q"] == 6.0
    assert list(found) == tree.paths(SPEC)


def test_dims_of_one_name_are_no_path():
    found = per_leaf(SPEC, 0, {dims("embed"): 1})
    assert found["embed"] == 0 and found["layers"][3]["norm"] == 1


@pytest.mark.parametrize(
    ("pattern", "part"),
    [("layer.*", "'layer.*'"), (dims("mlp embed"), "dims('mlp embed')"), ("Embed", "embed, layers")],
)
def test_a_pattern_without_a_leaf(pattern, part):
    with pytest.raises(UserError, match="matches no leaf") as error:
        per_leaf(SPEC, 1.0, {pattern: 2.0})
    assert part in str(error.value)


SCALE = {"layers.*": 0.5, dims("*mlp*"): 0.125, "layers.0.*": 2.0}
DECAY = {"embed": 0.0, "*.norm": 0.0, "layers.3.*": 0.4}
PAIRS = {
    "adamw": (adamw, torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6}),
    "adam": (adam, torch.optim.Adam, {"betas": (0.8, 0.95), "eps": 1e-6}),
    "sgd": (sgd, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}


@pytest.mark.parametrize(("our", "their", "options"), PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_to_parameter_groups(our, their, options, dtype):
    params, gradients = values(0, dtype), [values(i, dtype) for i in range(1, 5)]
    scale, decay = per_leaf(SPEC, 1.0, SCALE), per_leaf(SPEC, 0.2, DECAY)
    held = [torch.nn.Parameter(p.clone()) for p in tree.leaves(params)]
    groups = [
        {"params": [p], "lr": 0.02 * s, "weight_decay": d}
        for p, s, d in zip(held, tree.leaves(scale), tree.leaves(decay), strict=True)
    ]
    peer = their(groups, fused=True, **options)
    for grads in gradients:
        for p, g in zip(held, tree.leaves(grads), strict=True):
            p.grad = g.clone()
        peer.step()
    optimizer = our(0.02, lr_scale=scale, weight_decay=decay, **options)
    for donate in (False, True):
        got, _ = ours(optimizer, params, gradients, donate)
        same(got, tree.like(params, [p.detach() for p in held]))


@pytest.mark.parametrize("make", [adamw, adam, sgd, lion], ids=["adamw", "adam", "sgd", "lion"])
def test_groups_equal_leaves_alone(make):
    """A leaf with its own numbers goes as if it were alone with them."""
    params, gradients = values(0), [values(i) for i in range(1, 4)]
    scale, decay = per_leaf(SPEC, 1.0, SCALE), per_leaf(SPEC, 0.2, DECAY)
    got, _ = ours(make(lambda i: 0.1 / (i + 1), lr_scale=scale, weight_decay=decay), params, gradients)
    for n in ("embed", "layers.0.norm", "layers.3.q", "layers.5.up"):
        s, d = tree.named(scale)[n], tree.named(decay)[n]
        alone = make(lambda i, s=s: s * 0.1 / (i + 1), weight_decay=d)
        want, _ = ours(alone, tree.named(params)[n], [tree.named(g)[n] for g in gradients])
        torch.testing.assert_close(tree.named(got)[n], want, rtol=1e-12, atol=1e-12)


def test_muon_by_leaf():
    spec = {n: p for n, p in tree.named(SPEC).items() if n.endswith(("0.q", "1.up", "3.up"))}
    params = {n: torch.randn(p.shape, dtype=torch.float64) for n, p in spec.items()}
    grads = tree.tree_map(torch.randn_like, params)
    scale = per_leaf(spec, 1.0, {"*.up": 0.5})
    decay = per_leaf(spec, 0.1, {"layers.3.*": 0.7})
    got, _ = ours(muon(0.1, spec=spec, lr_scale=scale, weight_decay=decay), params, [grads])
    for n in spec:
        alone = muon(0.1 * scale[n], spec={n: spec[n]}, weight_decay=decay[n])
        want, _ = ours(alone, {n: params[n]}, [{n: grads[n]}])
        torch.testing.assert_close(got[n], want[n], rtol=1e-12, atol=1e-12)


def test_one_call_a_group(monkeypatch):
    sizes, fused = [], torch._fused_adamw_
    monkeypatch.setattr(torch, "_fused_adamw_", lambda p, *a, **k: sizes.append(len(p)) or fused(p, *a, **k))
    optimizer = adamw(
        0.1, lr_scale=per_leaf(SPEC, 1.0, {"*.up": 0.5}), weight_decay=per_leaf(SPEC, 0.1, {"*.norm": 0.0})
    )
    params = values(0)
    optimizer.update(params, params, optimizer.init(params))
    assert sorted(sizes) == [11, 11, 12]


def test_mask_and_scalars():
    """mask turns decay off; lr_scale may be one number, or a function of the parameters."""
    params, grads = values(0), values(1)
    mask = tree.tree_map(lambda p: p.ndim >= 2, params)
    want, _ = ours(adamw(0.05, weight_decay=tree.tree_map(lambda m: 0.3 if m else 0.0, mask)), params, [grads])
    for scale in (0.5, lambda p: tree.tree_map(lambda _: 0.5, p)):
        same(ours(adamw(0.1, weight_decay=0.3, mask=mask, lr_scale=scale), params, [grads])[0], want)


def test_a_tree_of_another_structure():
    for options in ({"lr_scale": {"a": 1.0}}, {"weight_decay": {"a": 1.0}}):
        optimizer = adamw(0.1, **options)
        with pytest.raises(UserError, match=f"{next(iter(options))} must be a tree of numbers"):
            optimizer.update(values(0), values(1), optimizer.init(values(0)))


# The moving average


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_ema_equals_torch(dtype):
    """torch's average begins as a copy of the weights at its first update."""
    params, gradients = values(0, dtype), [values(i, dtype) for i in range(1, 6)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    model = torch.nn.ParameterList([torch.nn.Parameter(p.to(wide)) for p in tree.leaves(params)])
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.7))
    average.update_parameters(model)
    optimizer = chain(adamw(0.05), ema(0.7))
    state, current = optimizer.init(params), params
    for grads in gradients:
        current, _, state = optimizer.update(current, grads, state)
        for p, x in zip(model, tree.leaves(current), strict=True):
            p.data = x.to(wide)
        average.update_parameters(model)
    want = tree.like(params, [p.detach() for p in average.module])
    close(ema_params(state), want, 1e-12 if dtype == torch.float64 else 1e-6)
    assert state["ema"]["count"] == 5 and set(state["ema"]) == {"count", "ema"}
    donated, end = ours(optimizer, params, gradients, donate=True)
    same((donated, end), (current, state))
    read = ema_params(state, like=params)
    assert all(x.dtype == dtype for x in tree.leaves(read))


def test_ema_warmup_and_debias():
    xs = [torch.full((3,), float(i), dtype=torch.float64) for i in range(1, 6)]

    def run(piece):
        state = piece.init({"p": torch.zeros(3, dtype=torch.float64)})
        for x in xs:
            _, _, state = piece.update({"p": x}, {"p": x}, state)
        return ema_params(state)["p"][0].item(), state

    average = 0.0
    for t in range(5):  # TensorFlow: min(decay, (1 + num_updates) / (10 + num_updates))
        decay = min(0.3, (1 + t) / (10 + t))
        average = decay * average + (1 - decay) * (t + 1)
    assert run(ema(0.3, warmup=True))[0] == pytest.approx(average, rel=1e-12)
    # with debias: the mean weighted by decay^age, as Adam's first moment
    weights = [0.9 ** (4 - t) for t in range(5)]
    want = sum(w * (t + 1) for t, w in enumerate(weights)) / sum(weights)
    got, state = run(ema(0.9, debias=True))
    assert got == pytest.approx(want, rel=1e-12) and state["left"] == pytest.approx(0.9**5)
    # an average of equal weights is any of them, whatever the decays
    for options in ({"warmup": True}, {}):
        piece = ema(lambda t: 0.5 + 0.1 * t, debias=True, **options)
        state = piece.init({"p": torch.zeros(2)})
        for _ in range(4):
            _, _, state = piece.update({"p": torch.full((2,), 3.0)}, None, state)
        torch.testing.assert_close(ema_params(state)["p"], torch.full((2,), 3.0))


def test_ema_of_master_copies():
    params, gradients = values(0, torch.bfloat16), [values(i, torch.float32) for i in range(1, 4)]
    wide = tree.tree_map(lambda p: p.float(), params)
    _, want = ours(chain(adamw(1e-4), ema(0.5)), wide, gradients)
    _, state = ours(with_master(chain(adamw(1e-4), ema(0.5))), params, gradients, donate=True)
    same(ema_params(state), ema_params(want))


def test_ema_leaves():
    """None, integers and frozen parameters; the average is a copy, and under donation its buffers stay."""
    params = {"a": torch.ones(2), "n": None, "i": torch.arange(3), "frozen": torch.full((2,), 2.0)}
    grads = {"a": torch.ones(2), "n": None, "i": None, "frozen": None}
    optimizer = chain(sgd(0.5), ema(0.5))
    state = optimizer.init(params)
    buffer = state["ema"]["ema"]["a"]
    params, _, state = optimizer.update(params, grads, state, donate=True)
    assert params["a"].tolist() == [0.5, 0.5] and state["ema"]["ema"]["a"] is buffer and buffer.tolist() == [0.75, 0.75]
    read = ema_params(state, like=params)
    assert read["n"] is None and torch.equal(read["i"], torch.arange(3)) and read["frozen"].tolist() == [2.0, 2.0]


def test_ema_makes_no_temporaries(monkeypatch):
    from fmegatron.optim import apply

    monkeypatch.setattr(apply, "PIECE", 64)
    params = {"a": torch.randn(40, 50), "b": torch.randn(1000).bfloat16()}
    piece = ema(0.9)
    state = piece.init(params)
    with Count() as count:
        piece.update(params, params, state, donate=True)
    assert count.largest <= 64


def test_ema_on_a_mesh_and_by_vmap():
    params, gradients = {"a": torch.randn(4, 6).double()}, [{"a": torch.randn(4, 6).double()} for _ in range(3)]
    optimizer = chain(adamw(0.1), ema(0.6, debias=True))
    _, want = ours(optimizer, params, gradients)
    with simulate(4):
        mesh, by = simulated_mesh(2, 2), {"a": (Shard(1), Replicate())}
        p = placed(params, mesh, by)
        state = optimizer.init(p)
        for grads in gradients:
            p, _, state = optimizer.update(p, placed(grads, mesh, by), state, donate=True)
        same_on_ranks(ema_params(state), placed(ema_params(want), mesh, by), 1e-12)

    def one(p):
        state = optimizer.init({"a": p})
        _, _, state = optimizer.update({"a": p}, {"a": p.sin()}, state)
        return ema_params(state)["a"]

    x = torch.randn(3, 5)
    torch.testing.assert_close(torch.func.vmap(one)(x), torch.stack([one(row) for row in x]))


def test_ema_errors():
    with pytest.raises(UserError, match="decay=1.0"):
        ema(1.0)
    params = {"a": torch.ones(2)}
    with pytest.raises(UserError, match="found 0"):
        ema_params(adamw(0.1).init(params))
    with pytest.raises(UserError, match="found 2"):
        ema_params(chain(ema(0.9), ema(0.99)).init(params))
