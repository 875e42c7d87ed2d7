"""ZeRO-1, -2, -3 and HSDP: the same training as one device, the bytes that each rank holds, checkpoints that go from one
to another, and the collectives that a step costs."""

import dataclasses
import functools
import math
import sys
from collections import Counter

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.func import grad

from fmegatron import checkpoint, tree
from fmegatron.accumulate import Term, Weight, accumulate
from fmegatron.context import Ctx
from fmegatron.errors import ShardingError, UserError
from fmegatron.grad import to_local
from fmegatron.initializers import Normal
from fmegatron.mesh import make_mesh
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.optim import (
    adafactor,
    adamw,
    chain,
    clip_by_global_norm,
    ema,
    ema_params,
    muon,
    muon_labels,
    partition,
    sgd,
    with_master,
    with_stochastic_rounding,
)
from fmegatron.optim.moments import FLOAT8
from fmegatron.parallel.legality import check_layout
from fmegatron.parallel.stack import stack
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.recording import record_collectives
from fmegatron.rules import Rules, standard_rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import Param, init, local_bytes, params_of
from fmegatron.step import TrainState, train_step
from fmegatron.zero import Reducer, cut_like_state, with_sharded_state
from tests.processes import processes
from tests.test_transforms_sharded import run_of, small_params, spec_of
from tests.transforms_model import loss_of, make_batch, ref_run, scalar_of, small_block, weights

torch.set_num_threads(1)
pytestmark = pytest.mark.xdist_group("gloo")

TINY = DecoderConfig(vocab=24, embed=16, layers=2, heads=4, kv_heads=2, head=2, mlp=20)
MODEL = Decoder(TINY)
SPEC = MODEL.spec()
DOUBLE = Precision(params=torch.float64)
STEPS = 2

# name: (mesh, options of standard_rules)
LAYOUTS = {
    "dp": ("dp=4", {}),
    "zero 1": ("dp=4", {"zero": 1}),
    "zero 2": ("dp=4", {"zero": 2}),
    "zero 3": ("dp=4", {"zero": 3}),
    "hsdp": ("dp=2,fsdp=2", {"store": "fsdp"}),
    "hsdp zero 1": ("dp=2,fsdp=2", {"zero": 1}),
    "hsdp, state over both": ("dp=2,fsdp=2", {"store": "fsdp", "store_optimizer": "dp"}),
    "tp sp zero 1": ("dp=2,tp=2", {"zero": 1, "sequence_parallel": True}),
    "tp sp zero 2": ("dp=2,tp=2", {"zero": 2, "sequence_parallel": True}),
    "tp zero 3": ("dp=2,tp=2", {"zero": 3}),
}
OPTIMIZERS = {
    "adamw": lambda: chain(clip_by_global_norm(0.1), adamw(1e-2), ema(0.5)),
    "muon": lambda: chain(
        clip_by_global_norm(0.1), partition(muon_labels(SPEC), {"muon": muon(0.1, spec=SPEC), "adamw": adamw(1e-2)})
    ),
    "adafactor": lambda: chain(clip_by_global_norm(0.1), adafactor(spec=SPEC, beta1=0.9)),
    "sgd": lambda: sgd(1.0, momentum=0.5),
    "master": lambda: with_master(chain(clip_by_global_norm(0.1), adamw(1e-2)), torch.float64),
    "bytes": lambda: chain(
        clip_by_global_norm(0.1),
        partition(muon_labels(SPEC), {"muon": adamw(1e-2, moments=FLOAT8), "adamw": adamw(1e-2)}),
    ),
    "rounding": lambda: with_stochastic_rounding(adamw(1e-2), key(5)),
}


def batch(seed, rows=8, seq=6):
    """Tokens of which unequal numbers count."""
    g = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, TINY.vocab, (2, rows, seq), generator=g)
    mask = torch.rand(rows, seq, generator=g) < torch.linspace(0.2, 0.9, rows)[:, None]
    return {"tokens": tokens, "labels": labels, "mask": mask}


BATCHES = [batch(i) for i in range(5)]


def sharding(layout, precision=DOUBLE):
    if layout is None:
        return Sharding(precision=precision)
    axes, options = LAYOUTS[layout]
    mesh = make_mesh(axes, kv_heads=TINY.kv_heads, device="cpu")
    return Sharding(mesh, standard_rules(mesh, **options), precision=precision)


def started(sh, optimizer="adamw", **options):
    """(state, step) before training."""
    made = with_sharded_state(OPTIMIZERS[optimizer](), SPEC, sh)
    params = init(SPEC, key(0), sh=sh)
    step = train_step(MODEL.loss, made, weights=MODEL.weights, sh=sh, spec=SPEC, **options)
    return TrainState(0, params, made.init(params), key(1)), step


def run(sh, state, step, steps=STEPS):
    """(state, [(loss, norm of gradients)]) after further steps."""
    found = []
    for _ in range(steps):
        state, metrics = step(state, {n: sh.shard(t, "batch seq") for n, t in BATCHES[state.step].items()})
        found.append((metrics["loss"], metrics["grad_norm"]))
    return state, found


def whole(x):
    """A leaf's global value as every rank has it, or None for a plain value."""
    if not isinstance(x, torch.Tensor):
        return []
    return per_rank(x.full_tensor() if isinstance(x, DTensor) else x)


def worst(found, want):
    """The largest difference of two results of `run`."""
    pairs = zip(tree.leaves(found), tree.leaves(want), strict=True)
    return max((float((x - b).abs().max()) for a, b in pairs for x in whole(a)), default=0.0)


@functools.cache
def one_device(optimizer, precision=DOUBLE):
    """What one device gives, and the averages: made once, in the process of the tests."""
    sh = sharding(None, precision)
    want = run(sh, *started(sh, optimizer))
    return want, ema_params(want[0].opt) if optimizer == "adamw" else None


def compared(layout, optimizer, precision, options, want, average):
    """The worst difference to one device after the steps, and whether donation kept the parameters' memory."""
    sh = sharding(layout, precision)
    state, step = started(sh, optimizer, **options)
    before = [t.to_local().data_ptr() for t in tree.leaves(state.params)]
    found = run(sh, state, step)
    params = found[0].params
    kept = before == [t.to_local().data_ptr() for t in tree.leaves(params)]
    if average is not None:  # they are read back in the layout of the parameters
        mine = ema_params(found[0].opt, like=params)
        assert [t.placements for t in tree.leaves(mine)] == [t.placements for t in tree.leaves(params)]
        found, want = (found, mine), (want, average)
    return worst(found, want), kept


def differences(layout, optimizer, precision, options):
    """`compared` on four processes."""
    return processes(4).run(compared, layout, optimizer, precision, options, *one_device(optimizer, precision))


# the others are covered by further tests below, with other optimizers
QUICK = {("dp", 1), ("zero 1", 2), ("zero 2", 2), ("zero 3", 2), ("hsdp, state over both", 2)}


@pytest.mark.parametrize(
    ("layout", "microbatches"),
    [pytest.param(n, m, marks=() if (n, m) in QUICK else pytest.mark.slow) for n in LAYOUTS for m in (1, 2)],
)
def test_steps_equal_one_device(layout, microbatches):
    """Parameters, moments, averages, losses and norms in float64, on four processes, clipping on."""
    options = {"microbatches": microbatches, "donate": microbatches == 2}
    for error, kept in differences(layout, "adamw", DOUBLE, options):
        assert error < 1e-11
        assert kept == options["donate"]


@pytest.mark.parametrize(
    "layout", ["zero 1", "hsdp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("zero 2", "zero 3"))]
)
def test_parameters_that_are_cast_for_equations(layout):
    """fp32 equations below float64 parameters and sums: equal up to the rounding of fp32."""
    mixed = Precision(params=torch.float64, compute=torch.float32, reduce=torch.float64)
    for error, _ in differences(layout, "sgd", mixed, {"microbatches": 2}):
        assert error < 1e-5


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        ("muon", "tp sp zero 1"),
        ("adafactor", "hsdp, state over both"),
        pytest.param("muon", "hsdp, state over both", marks=pytest.mark.slow),
        pytest.param("adafactor", "tp sp zero 1", marks=pytest.mark.slow),
    ],
)
def test_optimizers_of_whole_matrices(optimizer, layout):
    for error, _ in differences(layout, optimizer, DOUBLE, {}):
        assert error < 1e-10


@pytest.mark.parametrize("optimizer", ["master", "rounding"])
def test_master_copies_and_rounding_go_by_global_elements(optimizer):
    """Parameters in fp32 below masters in float64, and bf16 with random rounding: as on one device up to the order of
    sums. Rounding by local positions would differ in every second element."""
    low = Precision(params=torch.float32 if optimizer == "master" else torch.bfloat16, compute=torch.float32)
    for error, kept in differences("zero 1", optimizer, low, {"donate": True}):
        assert kept and error < (1e-4 if optimizer == "master" else 1e-2)


@pytest.mark.slow  # (by default fmegatron.testing's own tests run every stage in simulation)
@pytest.mark.parametrize("layout", ["zero 2", "hsdp, state over both"])
def test_simulated_ranks_equal_one_device(layout):
    alone = sharding(None)
    want = run(alone, *started(alone), steps=1)
    with simulate(4):
        sh = sharding(layout)
        assert worst(run(sh, *started(sh, microbatches=2), steps=1), want) < 1e-11


def test_second_derivatives_are_those_of_one_device():
    """Under torch.func nothing is delayed, and gradients are cut: a Hessian-vector product through them."""
    p, v, data = small_params(), small_params(seed=5), make_batch(vocab=12)
    spec = spec_of(p)

    def along(g, v):
        return sum((s * t).sum() for s, t in zip(tree.leaves(g), tree.leaves(v), strict=True))

    gradient = grad(scalar_of(lambda p, ctx: ref_run(p, ctx, small_block)))
    want = grad(lambda p: along(gradient(p, data), v))(p)
    with simulate(2):
        mesh = make_mesh("dp=2", device="cpu")
        rows = {"batch": "dp", **dict.fromkeys(("seq", "embed", "heads", "head", "mlp", "vocab"))}
        sh = Sharding(mesh, Rules(compute=rows, store="dp", zero=1))
        local, whole_v = to_local(tree.tree_map(sh.shard_param, (p, v), (spec, spec)))
        mine = tree.like(v, cut_like_state(tree.leaves(whole_v), tree.leaves(spec), sh))
        parts = {k: sh.shard(t, "batch seq") for k, t in data.items()}
        f = accumulate(loss_of(run_of(stack(small_block, spec["layers"]), spec)), weights=weights, spec=spec)
        found = grad(lambda p: along(f(p, parts, Ctx(sh))[1], mine))(local)
        for got, expected in zip(tree.leaves(found), tree.leaves(want), strict=True):
            for x in per_rank(got):
                torch.testing.assert_close(x, expected, rtol=0, atol=1e-11)


# --------------------------------------------------------------------------------------------------------- what is held


def held(layout):
    """Bytes of parameters, of gradients behind `accumulate` and of the optimizer's state on this rank."""
    sh = sharding(layout)
    state, _ = started(sh, "master")
    local = {n: sh.shard(t, "batch seq") for n, t in BATCHES[0].items()}
    f = accumulate(MODEL.loss, 2, weights=MODEL.weights, spec=SPEC)
    _, grads = f(state.params, local, Ctx(sh))
    return local_bytes(state.params), local_bytes(grads), local_bytes(state.opt)


def elements(divided_by):
    """Elements of all parameters, each divided by what `divided_by(param)` gives."""
    return sum(p.numel // divided_by(p) for p in params_of(SPEC).values())


@pytest.mark.parametrize(
    ("layout", "of_params", "of_grads", "of_state"),
    [
        ("dp", 1, 1, 1),
        ("zero 1", 1, 4, 4),
        ("zero 2", 1, 4, 4),
        ("zero 3", 4, 4, 4),
        ("hsdp", 2, 2, 2),
        ("hsdp zero 1", 1, 2, 2),
        ("hsdp, state over both", 2, 4, 4),
    ],
)
def test_bytes_that_each_rank_holds(layout, of_params, of_grads, of_state):
    """P parameters in float64 on d ranks: 8 P, 8 P and two moments of 8 P, each divided by d where the stage says so.

    (All dims of this model divide by four but mlp=20 by 4 too; the norms' one dim has one axis only under HSDP, where the
    mesh orders dp before fsdp.)
    """

    def cut(n):
        return lambda p: 2 if layout == "hsdp, state over both" and len(p.shape) == 1 else n

    expected = 8 * elements(cut(of_params)), 8 * elements(cut(of_grads)), 16 * elements(cut(of_state))
    assert processes(4).run(held, layout) == [expected] * 4


def most_of_gradients(zero):
    """The most elements of gradients in whole size that are alive at a time in a step, by the reducer's own account."""
    where = sys.modules["fmegatron.accumulate"]
    model, sh = Decoder(dataclasses.replace(TINY, layers=4)), sharding(f"zero {zero}")
    params = init(model.spec(), key(0), sh=sh)
    alive, most = 0, 0

    class Counting(Reducer):
        def add(self, i, g):
            nonlocal alive, most
            alive += math.prod(g.shape)
            most = max(most, alive)
            super().add(i, g)

        def wait(self, halfway=False):
            nonlocal alive
            alive -= sum(math.prod(self.params[i].shape) for members, _ in self.started for i in members)
            super().wait(halfway)

    where.Reducer = Counting
    try:
        f = accumulate(model.loss, 2, weights=model.weights, spec=model.spec())
        f(params, {n: sh.shard(t, "batch seq") for n, t in BATCHES[0].items()}, Ctx(sh))
    finally:
        where.Reducer = Reducer
    return most


def test_with_zero_2_gradients_are_never_whole():
    """Those of two layers at most, one's are reduced while the next one's are made; and small ones outside the layers,
    that go with the first of them."""
    layer = sum(p.numel for p in params_of(SPEC["layers"][0]).values())
    assert processes(4).run(most_of_gradients, 2) == [2 * layer + SPEC["head"].numel + SPEC["norm"].numel] * 4


# ---------------------------------------------------------------------------------------------------------- checkpoints


def one_more(layout, folder, load):
    """(loss, norm) of one more step, whose state goes to the next layout by a checkpoint."""
    sh = sharding(layout)
    state, step = started(sh, "bytes")
    state, [(loss, norm)] = run(sh, checkpoint.load(folder, state) if load else state, step, 1)
    if layout is not None:
        checkpoint.save(folder, state, step=state.step)
    return float(loss), float(norm)


@pytest.mark.parametrize(
    "layouts",
    [
        ("tp zero 3", "zero 1", "hsdp, state over both", "dp"),
        pytest.param(("zero 2", "zero 3", "tp sp zero 2", "hsdp zero 1"), marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_under_another_stage_and_mesh(tmp_path, layouts):
    """From stage to stage, and in the end on one device, with the losses and norms of one that was never stopped. Some moments
    are in float64, some in bytes."""
    sh = sharding(None)
    _, want = run(sh, *started(sh, "bytes"), steps=len(layouts) + 1)
    found = [processes(4).run(one_more, layout, str(tmp_path), n > 0) for n, layout in enumerate(layouts)]
    found.append([one_more(None, str(tmp_path), True)])
    for ranks, pair in zip(found, want, strict=True):
        for got in ranks:
            torch.testing.assert_close(got, tuple(map(float, pair)), rtol=0, atol=1e-11)


# ---------------------------------------------------------------------------------------------------------- collectives


def collectives_of(layout, microbatches, precision=DOUBLE):
    """{(kind, axes, dtype): number} of the collectives of parameters and gradients in one step: those of more than the
    few elements of sums and norms."""
    sh = sharding(layout, precision)
    state, step = started(sh, microbatches=microbatches)
    local = {n: sh.shard(t, "batch seq") for n, t in BATCHES[0].items()}
    with record_collectives() as found:
        step(state, local)
    return dict(Counter((c.kind, "+".join(c.axes), str(c.dtype)[6:]) for c in found if c.elements >= TINY.embed // 4))


L = TINY.layers
ENDS = 2  # the embedding; the last norm and the output matrix


@pytest.mark.parametrize("microbatches", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_one_collective_a_layer_and_one_reduction_a_step(microbatches):
    """What a step costs: with L layers and three leaves outside, gathers and reductions of a layer go together, and
    small leaves behind the layers with the last one's."""
    f64 = "float64"
    m = microbatches
    expected = {
        "dp": {("all-reduce", "dp", f64): L + 1},
        "zero 1": {("reduce-scatter", "dp", f64): L + 1, ("all-gather", "dp", f64): 1},
        "zero 2": {("reduce-scatter", "dp", f64): m * (L + 1), ("all-gather", "dp", f64): 1},
        "zero 3": {("reduce-scatter", "dp", f64): m * (L + ENDS), ("all-gather", "dp", f64): m * (2 * L + ENDS)},
        "hsdp": {
            ("reduce-scatter", "fsdp", f64): m * (L + ENDS),
            ("all-gather", "fsdp", f64): m * (2 * L + ENDS),
            ("all-reduce", "dp", f64): L + 1,
        },
    }
    for layout, counts in expected.items():
        assert processes(4).run(collectives_of, layout, m) == [counts] * 4, layout


@pytest.mark.parametrize("microbatches", [1, 3])
def test_sums_go_together(microbatches):
    """Weights in one all-reduce; losses and statistics of all microbatches in another."""
    x = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(0))
    with simulate(2):
        mesh = make_mesh("dp=2", device="cpu")
        sh = Sharding(mesh, Rules(compute={"batch": "dp", "seq": None, "embed": None}, store="dp", zero=0))
        spec = {"w": Param((4,), "embed", Normal(1.0), over="batch seq")}

        def loss(p, x, ctx):
            y = x * ctx.sh.use(p, spec)["w"]
            terms = {"a": Term(y.square().sum(-1), "batch seq"), "b": Term(y.sum((1, 2)), "batch")}
            return terms, {"sum": Term(y, "batch seq embed -> embed")}

        def weights(x):
            return {"a": Weight(x[..., 0] > 0, "batch seq"), "b": Weight((x[:, 0, 0] > 0), "batch")}

        f = accumulate(loss, microbatches, weights=weights, spec=spec)
        with record_collectives() as found:
            (total, metrics), _ = f(init(spec, key(0), sh=sh), sh.shard(x, "batch seq embed"), Ctx(sh))
        assert [(c.kind, c.elements, c.dtype) for c in found] == [
            ("all-reduce", 2, torch.int64),
            ("all-reduce", 2 + 4, torch.float32),
            ("all-reduce", 4, torch.float32),
        ]
        total, per_feature = per_rank(total)[1], per_rank(metrics["stats"]["sum"])[0]
    y = x * init(spec, key(0))["w"]
    torch.testing.assert_close(total, y.square().sum() / (x[..., 0] > 0).sum() + y.sum() / (x[:, 0, 0] > 0).sum())
    torch.testing.assert_close(per_feature, y.sum((0, 1)))


@pytest.mark.parametrize(
    ("layout", "reduce", "name"),
    [("zero 1", None, "float32"), ("zero 3", None, "float32"), ("zero 1", torch.bfloat16, "bfloat16")],
)
def test_gradients_are_summed_in_the_stated_dtype(layout, reduce, name):
    """fp32 by default, also below parameters in bf16, whose values travel in bf16."""
    low = Precision(params=torch.bfloat16, reduce=reduce)
    for found in processes(4).run(collectives_of, layout, 1, low):
        assert {d for kind, _, d in found if kind == "reduce-scatter"} == {name}
        assert {d for kind, _, d in found if kind == "all-gather"} == {"bfloat16"}


@pytest.mark.parametrize(
    "layout",
    [
        "dp",
        *(pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS if n not in ("dp", "tp sp zero 2")),
        "tp sp zero 2",
    ],
)
def test_sums_of_what_was_sent_are_exact(layout):
    """Pieces exchanged and added where they arrive (`Precision.wire`), in float64."""
    sent = Precision(params=torch.float64, wire=torch.float64)
    for error, _ in differences(layout, "adamw", sent, {"microbatches": 2}):
        assert error < 1e-11
    for found in processes(4).run(collectives_of, layout, 2, sent):
        assert any(kind == "all-to-all" and "dp" in axes for kind, axes, _ in found)
        assert not any(kind in ("all-reduce", "reduce-scatter") and "dp" in axes for kind, axes, _ in found)


# --------------------------------------------------------------------------------------------------------------- errors


def test_refusals():
    mesh = make_mesh("dp=4", device="cpu", abstract=True)
    sh = Sharding(mesh, standard_rules(mesh, zero=1))
    with pytest.raises(UserError, match=r"train_step needs spec=… on a mesh with zero=1"):
        train_step(MODEL.loss, adamw(1e-3), weights=MODEL.weights, sh=sh)
    with pytest.raises(UserError, match="zero=4 must be 0, 1"):
        Rules(store="dp", zero=4)
    with pytest.raises(ShardingError, match="store_optimizer='tp': no mesh axis is named 'tp'"):
        Sharding(mesh, Rules(store="dp", store_optimizer="tp"))
    optimizer = adamw(1e-3)
    assert with_sharded_state(optimizer, SPEC, Sharding(mesh, standard_rules(mesh, zero=3))) is optimizer


def test_a_loss_that_uses_another_sharding_is_refused():
    """Its gradients would be summed twice. What was under way leaves nothing that torch waits for."""
    under_way = torch._C._distributed_c10d._get_work_registry_size()
    with simulate(2):
        mesh = make_mesh("dp=2", device="cpu")
        sh = Sharding(mesh, standard_rules(mesh, zero=1), precision=DOUBLE)
        params = init(SPEC, key(0), sh=sh)
        f = accumulate(lambda p, b, ctx: MODEL.loss(p, b, ctx.replace(sh=sh)), weights=MODEL.weights, spec=SPEC)
        with pytest.raises(ShardingError, match="read parameters by ctx.sh"):
            f(params, {n: sh.shard(t, "batch seq") for n, t in BATCHES[0].items()}, Ctx(sh))
    assert torch._C._distributed_c10d._get_work_registry_size() == under_way


def test_plain_tensors_on_a_mesh_are_refused():
    with simulate(2):
        mesh = make_mesh("dp=2", device="cpu")
        sh = Sharding(mesh, standard_rules(mesh, zero=1))
        optimizer = with_sharded_state(adamw(1e-3), {"w": Param((4, 4), "embed mlp")}, sh)
        with pytest.raises(UserError, match="but got a plain tensor for 'embed mlp'"):
            optimizer.init({"w": torch.zeros(4, 4)})


def test_a_state_that_is_not_cut_is_refused():
    """An optimizer that was not wrapped, before anything is changed."""
    with simulate(2):
        mesh = make_mesh("dp=2", device="cpu")
        sh = Sharding(mesh, standard_rules(mesh, zero=1), precision=DOUBLE)
        params, optimizer = init(SPEC, key(0), sh=sh), adamw(1e-3)
        step = train_step(MODEL.loss, optimizer, weights=MODEL.weights, sh=sh, spec=SPEC)
        state = TrainState(0, params, optimizer.init(params))
        with pytest.raises(UserError, match="must have the parameter's shape and placements"):
            step(state, {n: sh.shard(t, "batch seq") for n, t in BATCHES[0].items()})


def test_legality_of_stages():
    mesh = make_mesh("dp=2,tp=2", device="cpu", abstract=True)
    sizes = {"heads": 4, "batch_size": 8, "seq_len": 8}
    check_layout(mesh, **sizes, zero=1)
    check_layout(mesh, **sizes, store=("dp",), zero=3)
    for options, message in (
        ({"zero": 5}, "--zero 5: the stages are 0"),
        ({"store": ("dp",), "zero": 0}, "--zero 0 stores nothing, so --store dp"),
    ):
        with pytest.raises(UserError, match=message):
            check_layout(mesh, **sizes, **options)
    with pytest.raises(UserError, match="--zero 1: the mesh tp=2 has no data axis"):
        check_layout(make_mesh("tp=2", device="cpu", abstract=True), **sizes, zero=1)
