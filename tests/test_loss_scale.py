"""Loss scaling: the sequence of scales, what a skipped step leaves alone, and training in fp16 on one rank and several."""

import dataclasses

import pytest
import torch

from fmegatron import checkpoint, tree
from fmegatron.accumulate import Term, Weight, accumulate
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.grad import value_and_grad
from fmegatron.loss_scale import LossScale, dynamic_loss_scale, static_loss_scale
from fmegatron.mesh import make_mesh
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.optim import adamw, chain, clip_by_global_norm, sgd
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.rules import standard_rules
from fmegatron.schedules import cosine
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import init
from fmegatron.step import NonFiniteError, TrainState, train_step
from tests.processes import processes

torch.set_num_threads(1)


def scales(policy, script):
    """The scale after each step of a script of "." (finite) and "x" (not)."""
    state, found = policy.init(), []
    for letter in script:
        state = policy.update(state, letter == ".")
        found.append(state.scale)
    return found, state


# ------------------------------------------------------------------------------------------------------------ the rule


@pytest.mark.parametrize(("initial", "factor", "backoff", "interval"), [
    (2.0**16, 2.0, 0.5, 3),
    (1000.0, 3.3, 0.3, 2),  # rounded to fp32 every time
    (2.0**126, 2.0, 0.5, 1),  # never grows to infinity
])  # fmt: skip
def test_the_scales_are_those_of_grad_scaler(initial, factor, backoff, interval):
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=initial, growth_factor=factor, backoff_factor=backoff, growth_interval=interval
    )
    g = torch.Generator().manual_seed(0)
    script = "".join("x" if x < 0.3 else "." for x in torch.rand(60, generator=g))
    script += "." * 12 + "x" * 5 + "." * 7
    policy = dynamic_loss_scale(
        initial, factor=factor, backoff=backoff, growth_interval=interval, hysteresis=1, minimum=1e-30
    )
    w = torch.nn.Parameter(torch.zeros(()))
    peer, want, moves = torch.optim.SGD([w], lr=1.0), [], 0
    for letter in script:
        scaler.scale(torch.ones(()))
        w.grad = torch.tensor(scaler.get_scale() if letter == "." else float("nan"))
        scaler.step(peer)
        scaler.update()
        want.append(scaler.get_scale())
        moves += letter == "."
    got, state = scales(policy, script)
    assert got == want and len(set(got)) > 3
    assert state.skipped == script.count("x") and moves == -w.item()


def test_hysteresis_is_megatron_s():
    """By hand from its rule: not restored by good steps, only by growth; further overflows back off at once."""
    policy = dynamic_loss_scale(64, growth_interval=3, hysteresis=2, minimum=16)
    #               .   x   .   .   x   .   x   .   .    .   x   .   x    x    x   .   .   .   .
    want = [64, 64, 64, 64, 32, 32, 16, 16, 16, 32, 32, 32, 16, 16, 16, 16, 16, 32, 32]  # fmt: skip
    got, state = scales(policy, ".x..x.x...x.xxx....")
    assert got == want
    assert state == LossScale(32.0, 1, 2, 7)


def test_a_static_scale_stays():
    got, state = scales(static_loss_scale(128, patience=3), "xx.xx.")
    assert got == [128.0] * 6 and state == LossScale(128.0, 0, 3, 4)
    assert not static_loss_scale(128, patience=2).exhausted(LossScale(128.0, 0, 2, 0))
    assert static_loss_scale(128, patience=2).exhausted(LossScale(128.0, 0, 1, 1))


def test_arguments_are_checked():
    for arguments, match in [
        ({"initial": 1.0, "minimum": 2.0}, "minimum=2.0"),
        ({"initial": float("inf")}, "initial=inf"),
        ({"factor": 1.0}, "factor=1.0"),
        ({"backoff": 1.0}, "backoff=1.0"),
        ({"growth_interval": 0}, "growth_interval=0"),
        ({"hysteresis": 0}, "hysteresis=0"),
    ]:
        with pytest.raises(UserError, match=match):
            dynamic_loss_scale(**arguments)
    with pytest.raises(UserError, match="patience=0"):
        static_loss_scale(2, patience=0)
    with pytest.raises(UserError, match="above 0"):
        static_loss_scale(0)
    params, optimizer = {"w": torch.ones(3)}, sgd(0.1)
    step = train_step(items, optimizer, weights=rows_of, loss_scale=dynamic_loss_scale())
    with pytest.raises(UserError, match="loss_scale=policy.init"):
        step(TrainState(0, params, optimizer.init(params)), batch_of())


# ----------------------------------------------------------------------------------------------------- a scripted model


def items(params, batch, ctx):
    """A product in fp16; `boost` enters behind it, so that its gradient overflows there and the loss does not."""
    y = torch.einsum("bi,i->b", batch["x"].half(), params["w"].half()).float()
    load = Term(batch["boost"], "batch")
    return Term((y - 1).square() * batch["boost"], "batch"), {"load": load}


def rows_of(batch):
    return {"loss": Weight(torch.ones(len(batch["x"])), "batch")}


def batch_of(seed=0, boost=1.0, rows=4):
    g = torch.Generator().manual_seed(seed)
    boosts = torch.ones(rows)
    boosts[-1] = boost  # in the last row alone
    return {"x": torch.randn(rows, 3, generator=g), "boost": boosts}


def scripted(policy=None, *, donate=False, microbatches=1, **others):
    """(step, first state) with everything that a step can change."""
    optimizer = chain(clip_by_global_norm(1.0), adamw(cosine(0.1, total=10, warmup=2)))
    step = train_step(
        items,
        optimizer,
        weights=rows_of,
        donate=donate,
        microbatches=microbatches,
        loss_scale=policy,
        update_extras=lambda e, stats: {"load": e["load"] + stats["load"]},
        **others,
    )
    params = {"w": torch.tensor([0.5, -1.0, 2.0])}
    state = TrainState(0, params, optimizer.init(params), key(1), {"load": torch.zeros(())})
    return step, dataclasses.replace(state, loss_scale=policy.init() if policy else None)


def copied(state):
    return [t.clone() if tree.is_tensor(t) else t for t in tree.leaves(state)]


def same(a, b):
    return all(
        torch.equal(x, y) if tree.is_tensor(x) else x == y
        for x, y in zip(a if isinstance(a, list) else tree.leaves(a), tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_skipped_step_leaves_all_but_the_batch_and_the_scale(donate, microbatches):
    policy = dynamic_loss_scale(2.0**12, growth_interval=4, hysteresis=1)
    step, state = scripted(policy, donate=donate, microbatches=microbatches)
    schedule, rates, used = cosine(0.1, total=10, warmup=2), [], []
    script = "..x.xx......"
    for i, letter in enumerate(script):
        batch = batch_of(i, boost=1e6 if letter == "x" else 1.0)
        before, old = copied((state.params, state.opt, state.extras)), state
        scale, skipped = state.loss_scale.scale, state.loss_scale.skipped
        state, metrics = step(state, batch)
        assert metrics["skipped"] == int(letter == "x") and metrics["loss_scale"] == scale
        assert torch.isfinite(metrics["loss"])
        assert same(before, (state.params, state.opt, state.extras)) == (letter == "x")
        assert state.step == i + 1 and state.loss_scale.skipped == skipped + (letter == "x")
        rates.append(metrics["lr"])
        used.append(metrics["loss_scale"])
        if donate:
            with pytest.raises(RuntimeError, match="donated"):
                _ = old.params
    assert [s / 2.0**12 for s in used] == [1, 1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 4, 1 / 4]
    count, good = 0, []
    for i, letter in enumerate(script):  # the rate is that of the optimizer's count
        assert rates[i] == schedule(count)
        count += letter == "."
        good += [i] * (letter == ".")
    assert state.opt["adamw"]["count"] == count == 9
    # skipped batches leave no trace, and a power of two changes no bit: as a run of the others alone
    only, other = scripted(static_loss_scale(256), microbatches=microbatches)
    for i in good:
        other, _ = only(other, batch_of(i))
    assert same((other.params, other.opt, other.extras), (state.params, state.opt, state.extras))


def test_an_overflow_by_the_scale_alone_is_cured_by_a_smaller_one():
    """fp16 holds 65,504: the last row's gradient is (y - 1) · 2 · boost · scale ÷ 4 there."""
    batch = batch_of(0, boost=64.0)
    with torch.no_grad():
        y = batch["x"].half() @ torch.tensor([0.5, -1.0, 2.0]).half()
    most = ((y.float() - 1) * 2 * batch["boost"] / 4).abs().max().item()
    policy = dynamic_loss_scale(hysteresis=1)
    step, state = scripted(policy)
    while most * state.loss_scale.scale > 65504:
        before = state
        state, metrics = step(state, batch)
        assert metrics["skipped"] == 1 and metrics["grad_norm"].isinf().item() | metrics["grad_norm"].isnan().item()
        assert state.params is before.params
    skipped = state.loss_scale.skipped
    assert skipped == state.step >= 3
    state, metrics = step(state, batch)
    assert metrics["skipped"] == 0 and state.loss_scale.skipped == skipped
    want = scripted()[0](scripted()[1], batch)  # this loss needs no scaling
    assert same(want[0].params, state.params) and metrics["loss"] == want[1]["loss"]
    assert metrics["grad_norm"] == want[1]["grad_norm"]  # without the scale


def test_when_skipping_cannot_help_the_step_refuses():
    step, state = scripted(dynamic_loss_scale(), donate=True)
    for _ in range(17):  # a loss that no scale cures: 16 halvings and one of hysteresis
        state, metrics = step(state, batch_of(boost=float("inf")))
        assert metrics["skipped"] == 1
    assert state.loss_scale == LossScale(1.0, 0, 0, 17)
    before = copied(state)
    with pytest.raises(
        NonFiniteError, match="step 18: the loss term 'loss' is not finite, and the loss scale, 1, cannot"
    ):
        step(state, batch_of(boost=float("inf")))
    assert same(before, state)  # not donated either
    with pytest.raises(NonFiniteError, match="step 18: the gradient of 'w'"):
        step(state, batch_of(boost=1e30))
    never, _ = scripted(dynamic_loss_scale(), check_finite=False)
    state, metrics = never(state, batch_of(boost=1e30))
    assert metrics["skipped"] == 1 and state.loss_scale == LossScale(1.0, 0, 0, 18)

    step, state = scripted(static_loss_scale(8.0, patience=3))
    for boost in (1e30, 1e30, 1.0, 1e30, 1e30):
        state, metrics = step(state, batch_of(boost=boost))
        assert metrics["loss_scale"] == 8 and metrics["skipped"] == int(boost > 1)
    with pytest.raises(NonFiniteError, match="step 6"):
        step(state, batch_of(boost=1e30))


def test_a_state_s_scale_without_a_policy_is_kept_unused():
    step, state = scripted()
    with_scale = dataclasses.replace(state, step=5, loss_scale=LossScale(4.0, 1, 2, 3))
    new, metrics = step(with_scale, batch_of())
    assert new.loss_scale == with_scale.loss_scale and "skipped" not in metrics
    assert metrics["lr"] == cosine(0.1, total=10, warmup=2)(2)
    with pytest.raises(NonFiniteError, match="not finite; the state"):
        step(with_scale, batch_of(boost=1e30))


class Reads(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the numbers that the host reads from a device, and so waits for."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("boost", [1.0, 1e6])
def test_a_step_reads_one_number(boost):
    step, state = scripted(dynamic_loss_scale(2.0**10))
    with Reads() as reads:
        _, metrics = step(state, batch_of(boost=boost))
    assert reads.number == 1 and metrics["skipped"] == int(boost > 1)
    step, state = scripted()
    with Reads() as reads:
        step(state, batch_of())
    assert reads.number == 1


# ----------------------------------------------------------------------------------------------------- the transforms


def smooth(params, batch, ctx):
    y = batch["x"] @ params["a"].tanh() + params["b"]
    return {"one": Term(y.square(), "batch"), "two": Term(y, "batch")}, None


PARAMS = {"a": torch.linspace(-1, 1, 3, dtype=torch.float64), "b": torch.tensor(0.3, dtype=torch.float64)}
ROWS = {"x": torch.linspace(-2, 3, 12, dtype=torch.float64).view(4, 3)}


def two(batch):
    return {"one": Weight(torch.ones(4), "batch", 0.5), "two": Weight(3.0)}


def one_term(params, batch, ctx):
    y = batch["x"] @ params["a"]
    return Term(y.square(), "batch", weight=y.new_tensor([1.0, 0.0, 1.0, 0.5])[: len(y)]), None


def close(a, b):
    for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True):
        assert x == y if not tree.is_tensor(x) else x.dtype == y.dtype and (x - y).abs().max() <= 1e-13 * y.abs().max()


@pytest.mark.parametrize("scale", [2.0**20, 1000.0])
def test_scaling_changes_no_gradient(scale):
    """Of accumulate and value_and_grad, with and without weights, under torch.func as well."""
    for loss, weights, n in [(smooth, two, 1), (smooth, two, 3), (one_term, None, 1)]:
        f = accumulate(loss, n, weights=weights)
        close(f(PARAMS, ROWS, loss_scale=scale), f(PARAMS, ROWS))

        def along(a, f=f, **scaling):  # a function of the gradient, to be differentiated again
            return f({**PARAMS, "a": a}, ROWS, **scaling)[1]["a"].sin().sum()

        a = PARAMS["a"]
        close(torch.func.grad(lambda a: along(a, loss_scale=scale))(a), torch.func.grad(along)(a))  # noqa: B023

    def mean(p):
        return (ROWS["x"] @ p["a"].tanh() + p["b"]).square().mean()

    g = value_and_grad(mean)
    close(g(PARAMS, loss_scale=scale), g(PARAMS))
    close(g(PARAMS)[1], torch.func.grad(mean)(PARAMS))
    again = torch.func.grad(lambda p: g(p, loss_scale=scale)[1]["a"].sin().sum() + g(p, loss_scale=scale)[0])
    close(again(PARAMS), torch.func.grad(lambda p: g(p)[1]["a"].sin().sum() + g(p)[0])(PARAMS))
    # one gradient tensor for two leaves is divided once for each
    pair = value_and_grad(lambda p: (p["a"] + p["b"]).sum())({"a": a, "b": a}, loss_scale=scale)[1]
    close(pair, {"a": torch.ones_like(a), "b": torch.ones_like(a)})


def test_a_loss_in_fp16_meets_no_factor_that_fp16_cannot_hold():
    """Scale and weight are multiplied first: alone, 2**16 would be infinite in fp16, and 2**-26 zero."""

    def loss(params, batch, ctx):
        return Term(batch["x"].half() * params["w"].half(), "batch"), None

    def weights(batch):
        return {"loss": Weight(2.0**26)}

    params, batch = {"w": torch.tensor(2.0)}, {"x": torch.ones(4)}
    (total, _), grads = accumulate(loss, weights=weights)(params, batch, loss_scale=65536.0)
    assert grads["w"] == 4 * 2.0**-26 and grads["w"].dtype is torch.float32 and total.isfinite()
    half = {"w": params["w"].half()}
    narrow = Ctx(sh=Sharding(precision=Precision(params=torch.float16, reduce=torch.float16)))
    _, grads = accumulate(loss, 2, weights=weights)(half, batch, narrow, loss_scale=65536.0)
    assert grads["w"] == 4 * 2.0**-26 and grads["w"].dtype is torch.float32  # divided by the scale behind fp16

    # products in float32 of which only sums are in fp16 need the scale as well
    for scale, kept in ((1.0, 0), (65536.0, 1)):
        sums = Ctx(sh=Sharding(precision=Precision(reduce=torch.float16)))
        (_, _), grads = accumulate(loss, 2, weights=weights)(params, batch, sums, loss_scale=scale)
        assert grads["w"] == kept * 4 * 2.0**-26


def test_inside_torch_func_nothing_is_skipped():
    policy = dynamic_loss_scale(2.0**10)
    optimizer = sgd(0.1)
    step, plain = (train_step(one_term, optimizer, loss_scale=p) for p in (policy, None))

    def after(p, step, scaling):
        state, _ = step(TrainState(3, p, optimizer.init(p), loss_scale=scaling), ROWS)
        assert state.loss_scale == scaling and state.step == 4
        return state.params["a"].sin().sum()

    got = torch.func.grad(lambda p: after(p, step, policy.init()))(PARAMS)
    close(got, torch.func.grad(lambda p: after(p, plain, None))(PARAMS))


# ------------------------------------------------------------------------------------------------- a transformer in fp16

CONFIG = DecoderConfig(vocab=24, embed=16, layers=2, heads=4, kv_heads=2, head=4, mlp=32)
MODEL = Decoder(CONFIG)
HALF = Precision(compute=torch.float16)


def text(seed, rows=4):
    g = torch.Generator().manual_seed(seed % 3)  # three batches again and again, so that there is something to learn
    tokens = torch.randint(0, CONFIG.vocab, (rows, 8), generator=g)
    return {"tokens": tokens, "labels": tokens.roll(-1, 1), "boost": torch.ones(rows, 8)}


def boosted(params, batch, ctx):
    """The model's loss, of which a batch may make single tokens' gradients overflow."""
    terms, stats = MODEL.loss(params, batch, ctx)
    return {n: dataclasses.replace(t, items=t.items * batch["boost"]) for n, t in terms.items()}, stats


def training(precision, policy=None, *, coefficient=1.0, sh=None, **options):
    """(step, first state) of the transformer, whose loss is multiplied by `coefficient`."""
    sh = sh or Sharding(precision=precision)

    def weights(batch):
        return {n: dataclasses.replace(w, coefficient=coefficient) for n, w in MODEL.weights(batch).items()}

    optimizer = adamw(cosine(1e-2, total=40, warmup=3), eps=1e-16, weight_decay=0.0)
    step = train_step(boosted, optimizer, weights=weights, sh=sh, loss_scale=policy, **options)
    params = init(MODEL.spec(), key(0), sh=sh)
    state = TrainState(0, params, optimizer.init(params), key(1))
    return step, dataclasses.replace(state, loss_scale=policy.init() if policy else None)


def run(step, state, steps, first=0):
    losses = []
    for i in range(first, first + steps):
        state, metrics = step(state, text(i))
        losses.append(float(metrics["loss"]))
    return state, losses


def test_training_in_fp16_follows_fp32_where_it_does_not_without_a_scale():
    """With gradients as small as a mean over a million tokens makes them: without a scale all of them vanish."""
    coefficient = 1e-7
    _, want = run(*training(Precision(), coefficient=coefficient), 20)
    begun = training(HALF, coefficient=coefficient)
    stuck, lost = run(*begun, 20)
    scaled, got = run(*training(HALF, dynamic_loss_scale(2.0**20), coefficient=coefficient), 20)
    assert want[-1] < 0.75 * want[0]
    assert scaled.loss_scale.skipped == 0
    assert max(abs(a - b) / b for a, b in zip(got, want, strict=True)) < 5e-3
    moved = torch.cat([p.flatten() for p in tree.leaves(stuck.params["layers"])])
    first = torch.cat([p.flatten() for p in tree.leaves(begun[1].params["layers"])])
    assert torch.equal(moved, first)  # no layer learns
    assert lost[-1] > 0.9 * want[0]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_training_in_fp16_from_a_scale_that_is_too_large(microbatches):
    """The first steps find the scale, the others follow fp32; pure and donating are bitwise the same."""
    policy = dynamic_loss_scale(2.0**24, growth_interval=4)
    step, state = training(HALF, policy, microbatches=microbatches)
    donating, other = training(HALF, policy, microbatches=microbatches, donate=True)
    plain, exact = training(Precision())
    skips, used = [], []
    for i in range(20):
        batch = text(i)
        state, metrics = step(state, batch)
        other, again = donating(other, batch)
        assert same(state, other)
        assert metrics["loss"] == again["loss"] and metrics["loss_scale"] == again["loss_scale"]
        skips.append(metrics["skipped"])
        used.append(metrics["loss_scale"])
        if not metrics["skipped"]:
            exact, want = plain(exact, batch)
            assert abs(metrics["loss"] - want["loss"]) < 5e-3 * want["loss"]
            assert abs(metrics["grad_norm"] - want["grad_norm"]) < 2e-2 * want["grad_norm"]
    found = skips.index(0)
    assert 2 <= found <= 12 and used[found] == 2.0 ** (24 - found + 1)
    assert any(b > a for a, b in zip(used[found:-1], used[found + 1 :], strict=True))  # it grew again


@pytest.mark.parametrize("at", [2, 5, 6])
def test_a_run_goes_on_from_a_checkpoint_bitwise(at, tmp_path):
    """Saved before, in and after its overflows."""
    policy = dynamic_loss_scale(2.0**18, growth_interval=3)
    step, state = training(HALF, policy)
    batches = [text(i) for i in range(10)]
    batches[5]["boost"][1, 2] = 1e6
    for i, batch in enumerate(batches):
        if i == at:
            checkpoint.save(tmp_path, state, step=i)
        state, _ = step(state, batch)
    assert state.loss_scale.skipped >= 1
    again = checkpoint.load(tmp_path, training(HALF, policy)[1])
    assert isinstance(again.loss_scale, LossScale) and again.step == at
    for batch in batches[at:]:
        again, _ = step(again, batch)
    assert same(state, again)


def test_states_without_a_scale_are_saved_as_before(tmp_path):
    """A checkpoint of five entries loads, and an fp16 run may begin from it."""
    policy = dynamic_loss_scale()
    step, state = training(Precision())
    names = {path.split(".")[0] for path in tree.paths(state)}
    assert names == {"step", "params", "opt", "key", "extras"}
    assert tree.like(state, tree.leaves(state)).loss_scale is None
    checkpoint.save(tmp_path, state, step=0)
    half, like = training(HALF, policy)
    with pytest.raises(UserError, match="4 missing in it: loss_scale.scale, loss_scale.good_steps"):
        checkpoint.load(tmp_path, like)
    old = checkpoint.load(tmp_path, dataclasses.replace(like, loss_scale=None))
    new, metrics = half(dataclasses.replace(old, loss_scale=policy.init()), text(0))
    assert new.loss_scale.skipped == metrics["skipped"]
    assert [p for p in tree.paths(new) if p.startswith("loss_scale")] == [
        "loss_scale.scale",
        "loss_scale.good_steps",
        "loss_scale.hysteresis",
        "loss_scale.skipped",
    ]


# ------------------------------------------------------------------------------------------------------- several ranks


OVERFLOW = 2
BATCHES = [text(i) for i in range(5)]  # (a simulation has other random numbers)
BATCHES[OVERFLOW]["boost"][-1, 3] = 1e9  # one token of the last row


def sharded_run(sh):
    """[(loss, scale, skipped, norm of the parameters)] of each step, of which one overflows on one rank."""
    step, state = training(None, dynamic_loss_scale(2.0**14, hysteresis=1), sh=sh, donate=True)
    found = []
    for batch in BATCHES:
        batch = {n: sh.shard(x, "batch seq") for n, x in batch.items()}
        state, metrics = step(state, batch)
        found.append((metrics["loss"], metrics["loss_scale"], metrics["skipped"], metrics["param_norm"]))
    return found


def agrees(found, want):
    for i, (got, one) in enumerate(zip(found, want, strict=True)):
        assert got[1:3] == one[1:3] == (2.0**14 if i <= OVERFLOW else 2.0**13, int(i == OVERFLOW))
        assert abs(float(got[0]) - float(one[0])) < 2e-3 * float(one[0])
        assert abs(float(got[3]) - float(one[3])) < 1e-4 * float(one[3])


@pytest.mark.parametrize("store", [(), "dp"])
def test_an_overflow_on_one_simulated_rank_skips_on_all(store):
    want = sharded_run(Sharding(precision=HALF))
    with simulate(2):
        mesh = make_mesh("dp=2", device="cpu")
        found = sharded_run(Sharding(mesh, standard_rules(mesh, store=store), precision=HALF))
        for ranks in ([per_rank(x) for x in (loss, norm)] for loss, _, _, norm in found):
            assert all(torch.equal(values[0], v) for values in ranks for v in values)
        found = [(per_rank(a)[0], b, c, per_rank(d)[0]) for a, b, c, d in found]
    agrees(found, want)


def on_processes(axes, store):
    mesh = make_mesh(axes, kv_heads=2, device="cpu")
    sh = Sharding(mesh, standard_rules(mesh, sequence_parallel=True, store=store), precision=HALF)
    return [(float(a), b, c, float(d)) for a, b, c, d in sharded_run(sh)]


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("store", [(), ("dp",)])
def test_an_overflow_on_one_process_skips_on_all(store):
    every = processes(4).run(on_processes, "dp=2,tp=2", store)
    assert every[0] == every[1] == every[2] == every[3]
    agrees(every[0], sharded_run(Sharding(precision=HALF)))


# -------------------------------------------------------------------------------------------------------------- a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_in_fp16_on_a_gpu_follows_fp32():
    """A compute dtype of fp16 with the device's own kernels: losses follow, an overflow is skipped, one read a step."""

    def place(state):
        return tree.tree_map(lambda t: t.cuda() if tree.is_tensor(t) else t, state)

    policy = dynamic_loss_scale(2.0**12)
    half, a = training(HALF, policy)
    full, b = training(Precision())
    a, b = place(a), place(b)
    for i in range(20):
        batch = place(text(i))
        b, want = full(b, batch)
        a, metrics = half(a, batch)
        assert metrics["skipped"] == 0 and abs(metrics["loss"] - want["loss"]) < 1e-2 * want["loss"]
    before, batch = copied((a.params, a.opt)), place(text(0))
    batch["boost"][1, 2] = 1e9
    with Reads() as reads:
        a, metrics = half(a, batch)
    assert metrics["skipped"] == 1 and same(before, (a.params, a.opt)) and reads.number == 1
