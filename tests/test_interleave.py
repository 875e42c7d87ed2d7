"""Programs by turns: the same values, and one computes while another one's rows are on their way."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import time

import pytest
import torch

import fmegatron as fm
from fmegatron import collectives, exchange, job, tree
from fmegatron.accumulate import accumulate
from fmegatron.config import BatchConfig, ExpertConfig, TrainConfig
from fmegatron.errors import UserError
from fmegatron.interleave import by_turns, halfway, interleaved, pass_turn
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.models.moe import MoE
from fmegatron.padding import shard_batch
from fmegatron.parallel.dispatch import dispatched
from fmegatron.parallel.experts import mlp_experts
from fmegatron.parallel.pipeline import pipeline
from fmegatron.parallel.routing import Routed, Routing
from fmegatron.parallel.schedule_simulation import Costs, parse_costs, simulate, turns, turns_time, with_exchange
from fmegatron.parallel.schedules import make_schedule
from fmegatron.precision import Precision
from fmegatron.rules import standard_rules
from fmegatron.testing import Layout
from fmegatron.testing.program import Program
from tests.mutants.edits import applied
from tests.mutants.interleave_table import INTERLEAVE_MUTANTS, WAITING
from tests.processes import processes

torch.set_num_threads(1)
pytestmark = pytest.mark.xdist_group("gloo")

DOUBLE = Precision(params=torch.float64)
MODES = ("pairs", "1f1b")

# ---------------------------------------------------------------------------------------------------- turns themselves


def program(log, name, segments, forward=None):
    """A function of so many segments, with its half behind the segment `forward`."""

    def run():
        for n in range(segments):
            log.append((name, n))
            if n + 1 < segments:
                pass_turn()
            if n == forward:
                halfway()
        return name

    return run


@pytest.mark.parametrize("segments", [(3, 3), (4, 2), (1, 3), (2, 5)])
def test_two_programs_take_turns_as_the_table_says(segments):
    log = []
    got = interleaved(program(log, 0, segments[0]), program(log, 1, segments[1]))
    assert got == (0, 1) and log == turns(segments)


def test_the_third_begins_when_the_first_has_ended():
    log = []
    assert by_turns([program(log, name, 2) for name in range(5)]) == [0, 1, 2, 3, 4]
    assert log == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (3, 0), (2, 1), (4, 0), (3, 1), (4, 1)]


def test_staggered_a_forward_runs_beside_the_backward_before_it():
    log = []
    by_turns([program(log, name, 4, forward=1) for name in range(4)], staggered=True)
    forward = [[log.index((m, n)) for n in (0, 1)] for m in range(4)]
    backward = [[log.index((m, n)) for n in (2, 3)] for m in range(4)]
    for m in range(3):
        assert forward[m][-1] < forward[m + 1][0] and backward[m][-1] < backward[m + 1][0]
        assert backward[m][0] < forward[m + 1][1] and forward[m + 1][0] < backward[m][1]  # and not one behind the other


class Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log, name):
        ctx.log, ctx.name = log, name
        log.append((name, "forward", torch.is_grad_enabled()))
        pass_turn()
        return x * 2

    @staticmethod
    def backward(ctx, g):
        ctx.log.append((ctx.name, "backward"))
        pass_turn()
        return g * 2, None, None


def test_a_turn_passes_in_the_middle_of_a_backward():
    log, x = [], torch.ones(3, requires_grad=True)

    def run(name):
        return torch.autograd.grad(Pass.apply(Pass.apply(x, log, name), log, name).sum(), x)[0]

    a, b = interleaved(lambda: run("a"), lambda: run("b"))
    assert a.tolist() == b.tolist() == [4.0] * 3
    assert [name for name, *_ in log] == list("abababab") and [what for _, what, *_ in log[::2]] == [
        *["forward"] * 2,
        *["backward"] * 2,
    ]


@pytest.mark.parametrize("first", [True, False])
def test_what_one_of_them_raises_ends_the_other(first):
    log, before = [], threading.active_count()

    def fails():
        pass_turn()
        raise ValueError("of one of them")

    two = (fails, program(log, 0, 9))
    with pytest.raises(ValueError, match="of one of them"):
        interleaved(*(two if first else two[::-1]))
    assert len(log) <= 2 and threading.active_count() == before
    pass_turn()  # nothing happens


def test_where_a_thread_has_a_state_of_its_own_they_run_one_behind_the_other():
    for around in (
        torch.inference_mode(),
        torch.autocast("cpu"),
        torch.device("meta"),
        torch.autograd.graph.save_on_cpu(),
        fm.simulate(2),
    ):
        log = []
        with around:
            interleaved(program(log, 0, 3), program(log, 1, 3))
        assert [name for name, _ in log] == [0, 0, 0, 1, 1, 1]
    log = []
    torch.func.grad(lambda x: (interleaved(program(log, 0, 2), program(log, 1, 2)), x)[1])(torch.ones(()))
    assert [name for name, _ in log] == [0, 0, 1, 1]
    with torch.no_grad():
        assert interleaved(torch.is_grad_enabled, torch.is_grad_enabled) == (False, False)


# ------------------------------------------------------------------------------------------------------- whole models

MODEL = Decoder(
    DecoderConfig(
        vocab=24,
        embed=8,
        layers=2,
        heads=4,
        mlp=8,
        kv_heads=2,
        head=4,
        moe=MoE(Routing(4, 2, normalised=True, switch_loss=0.5, z_loss=0.01, capacity=0.9), 4, shared=4),
    )
)
LAYOUTS = [
    "dp=2 ep=2 micro=4 remat=nothing zero=2",
    "dp=2,tp=2 sp ep=4 micro=2 zero=3 remat=attention mask=uneven",
    "cp=2,dp=2 ep=2 micro=3 zero=1 mask=row",
    "dp=2,tp=2 ep=2 etp=2 micro=2 dispatch=all-gather",
]


@functools.cache  # first called outside of a simulation, in which every rank would draw its own
def given(text):
    """(parameters, batch) of a layout."""
    layout = Layout.parse(text)
    return Program(MODEL).params_of(MODEL.spec(), torch.float64), Program(MODEL).batch_of(layout)


def gradients(text, overlap="none"):
    """(value, metrics, raw gradients) on this rank, or on one device without a mesh."""
    layout = Layout.parse(text)
    program = Program(MODEL).on(layout)
    spec = MODEL.spec()
    sh = fm.Sharding(precision=DOUBLE) if overlap is None else program.sharding(layout, DOUBLE)
    params, batch = given(text)
    params, batch = sh.shard_params(params, spec), shard_batch(batch, sh)
    model = program.model
    micro = {} if overlap is None else {"microbatches": layout.micro, "overlap": overlap}
    f = accumulate(model.loss, weights=model.weights, spec=spec if sh.mesh else None, **micro)
    (value, metrics), grads = f(params, batch, fm.Ctx(sh=sh, key=fm.key(0)))
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tree.leaves(grads)]
    return [value, *tree.tensors(metrics)[0], *whole]


def distances(text, want):
    """The greatest relative distance from `want`, by mode."""
    found = {}
    for mode in MODES:
        got = gradients(text, mode)
        assert len(got) == len(want)
        off = (
            (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-9) for a, b in zip(got, want, strict=True)
        )
        found[mode] = max(map(float, off))
    return found


@pytest.mark.parametrize("text", LAYOUTS)
def test_loss_gradients_and_statistics_are_those_of_one_device(text):
    world = Layout.parse(text).world
    for found in processes(world).run(distances, text, gradients(text, None)):
        assert max(found.values()) < 1e-12, found


def test_in_a_simulation_and_on_one_device():
    text = "dp=2 ep=2 micro=3 zero=1"
    want = gradients(text, None)
    with fm.simulate(2):
        for mode in MODES:
            for a, b in zip(gradients(text, mode), want, strict=True):
                for x in fm.per_rank(a):
                    torch.testing.assert_close(x.double(), b.double(), rtol=1e-12, atol=1e-14)


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserError, match="overlap='twos' is not known: use one of none, pairs, 1f1b"):
        accumulate(MODEL.loss, 2, overlap="twos")
    with pytest.raises(UserError, match="overlap='pairs' runs two forwards at once"):
        accumulate(MODEL.loss, 2, overlap="pairs", running=lambda extras, stats: extras)


MIXTURE = {"moe": ExpertConfig(experts=4), "ep": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "--microbatch-overlap pairs: the model has no experts"),
        (MIXTURE | {"batch": BatchConfig(microbatches=1)}, "there is one microbatch: add --batch.microbatches 2"),
        (MIXTURE | {"mesh": "pp=2,dp=2"}, "--microbatch-overlap pairs.* a pipeline"),
        (
            MIXTURE | {"moe": ExpertConfig(experts=4, group="approximate", switch_loss=0.01)},
            "counts the microbatches before: use --microbatch-overlap 1f1b",
        ),
    ],
)
def test_settings_that_do_not_fit_are_told_before_anything_is_made(settings, message):
    config = TrainConfig(
        **{"mesh": "dp=2", "batch": BatchConfig(microbatches=2), "microbatch_overlap": "pairs", **settings}
    )
    world = 4 if "pp" in config.mesh else 2
    with pytest.raises(UserError, match=message):
        job.check(config, world, job.model_config(config, None))


def test_the_flag_reaches_the_step(monkeypatch):
    seen = []
    monkeypatch.setattr(job, "accumulate", lambda *args, overlap, **options: seen.append(overlap))
    for overlap in ("none", "pairs", "1f1b"):
        config = TrainConfig(mesh="dp=2", batch=BatchConfig(microbatches=2), microbatch_overlap=overlap, **MIXTURE)
        job.check(config, 2, job.model_config(config, None))
    assert seen == ["pairs", "1f1b"]


# ------------------------------------------------------------------------------- what is issued and awaited, and when

EMBED, EXPERTS, ROWS, SEQ, LAYERS = 4, 4, 4, 4, 2
SPEC = {
    "mix": fm.Param((EMBED, EMBED), "embed route", over="batch seq"),
    "experts_gate_up": fm.Param((EXPERTS, EMBED, 2, EMBED), "expert embed gated emlp", over="batch' seq'"),
    "experts_down": fm.Param((EXPERTS, EMBED, EMBED), "expert emlp embed", over="batch' seq'"),
}


class Watched:
    """While open: exchanges and computations are noted in `events` with their microbatch, the first (a) or the second (b);
    each exchange takes `delay` seconds, and each computation `work`."""

    now = None

    def __init__(self, delay=0.0, work=0.0):
        self.events, self.delay, self.work, self.began, self.waited = [], delay, work, {}, 0.0
        self.original = exchange.begin_rows, exchange.end_rows

    def note(self, what):
        self.events.append((what, "a" if threading.current_thread() is threading.main_thread() else "b"))

    def begin(self, x, *args):
        y = self.original[0](x, *args)
        if x.shape[1] > 1:  # not the weights', which go along
            self.note("begin")
        self.began[id(y)] = y, time.monotonic()
        return y

    def end(self, y):
        _, at = self.began.pop(id(y))
        left = max(0.0, at + self.delay - time.monotonic())
        time.sleep(left)
        self.waited += left
        if y.shape[1] > 1:
            self.note("end")
        return self.original[1](y)

    def __enter__(self):
        exchange.begin_rows, exchange.end_rows, Watched.now = self.begin, self.end, self
        return self

    def __exit__(self, *_):
        exchange.begin_rows, exchange.end_rows = self.original
        Watched.now = None


class Work(torch.autograd.Function):
    """A computation that takes a while, forward and backward."""

    @staticmethod
    def forward(ctx, x, what):
        ctx.what = what
        Work.happens(what)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        Work.happens(f"{ctx.what} back")
        return g.clone(), None

    @staticmethod
    def happens(what):
        if Watched.now is not None:
            Watched.now.note(what)
            time.sleep(Watched.now.work)


def loss(params, batch, ctx, backend="all-to-all", shared=False):
    sh = ctx.sh
    p, x = sh.use(params, SPEC), batch["x"]

    def experts(rows, weights, ends, leaves, *, sh):
        return Work.apply(mlp_experts("swiglu")(rows, weights, ends, leaves, sh=sh), "experts")

    for _ in range(LAYERS):
        x = x + Work.apply(sh.dot(x, p["mix"], "batch seq embed, embed route -> batch seq route").tanh(), "mix")
        # evenly, whatever the values are: exchanges of all microbatches have equal shapes
        chosen = (torch.arange(x.shape[1]) % EXPERTS).expand(x.shape[:2])[..., None]
        weights = x.sigmoid().mean(-1, keepdim=True)
        routed = Routed(chosen, weights, weights, weights, chosen, places=-(-chosen.numel() // EXPERTS))
        options = {"number": EXPERTS, "sh": sh, "backend": backend}
        beside = functools.partial(Work.apply, x.tanh(), "shared") if shared else None
        x = x + dispatched(experts, x, routed, p, beside=beside, **options)
    items = Work.apply(x, "head").square().sum(-1)
    return fm.Term(items, "batch seq", weight=torch.ones_like(items)), None


@functools.cache
def drawn():
    made = torch.Generator().manual_seed(0)
    params = {n: torch.randn(p.shape, generator=made, dtype=torch.float64) * 0.5 for n, p in SPEC.items()}
    return params, {"x": torch.randn(2 * ROWS, SEQ, EMBED, generator=made, dtype=torch.float64)}


def step(overlap, zero=0, **options):
    """[value, *gradients] of two microbatches over all ranks, whose experts lie on all of them."""
    world = torch.distributed.get_world_size()
    mesh = fm.make_mesh(f"dp={world}", also=[f"ep={world}"])
    sh = fm.Sharding(mesh, standard_rules(mesh, zero=zero, **({"store": "dp"} if zero else {})), DOUBLE)
    params, batch = drawn()
    params, batch = sh.shard_params(params, SPEC), {"x": sh.shard(batch["x"], "batch seq embed")}
    (value, _), grads = accumulate(functools.partial(loss, **options), 2, spec=SPEC, overlap=overlap)(
        params, batch, fm.Ctx(sh=sh)
    )
    return [value, *(t.full_tensor() if hasattr(t, "full_tensor") else t for t in tree.leaves(grads))]


def events(overlap, edits=()):
    with applied(edits), Watched() as watched:
        step(overlap)
    return watched.events


def hidden(log):
    """Of each exchange, what the other microbatch computed between its issue and the wait for it."""
    found = []
    for n, (what, name) in enumerate(log):
        if what == "begin":
            end = next(i for i in range(n, len(log)) if log[i] == ("end", name))
            found.append([w for w, other in log[n:end] if other != name and w not in ("begin", "end")])
    return found


COMPUTE = [*["mix", "experts"] * LAYERS, "head"]


@pytest.mark.parametrize("world", [2, 4])
def test_an_exchange_is_under_way_while_the_other_microbatch_computes(world):
    """Issued before it and awaited behind it, in forward and backward: in pairs all; in 1f1b those of the second forward and the first backward."""
    both, last, plain = (processes(world).run(events, mode) for mode in ("pairs", "1f1b", "none"))
    for some in (both, last, plain):
        assert all(log == some[0] for log in some)  # the same order on all ranks
    assert all(not some for some in hidden(plain[0])) and len(hidden(plain[0])) == 8 * LAYERS
    found = hidden(both[0])
    assert len(found) == 8 * LAYERS and all(found)
    a = [w for w, name in both[0] if name == "a" and w not in ("begin", "end")]
    assert a == [*COMPUTE, *(f"{w} back" for w in COMPUTE[::-1])]
    found = [some for some in hidden(last[0]) if some]
    back = [some[0].endswith("back") for some in found]
    assert len(found) >= 4 * LAYERS - 1 and 2 * LAYERS <= sum(back) and back.count(False) >= 2 * LAYERS - 1


def events_of_gathers(overlap):
    """The same where tokens are gathered and results summed in place of an exchange of rows; and the values."""
    begin, end, under_way, watched = collectives.begin, collectives.end, {}, Watched()

    def noted_begin(kind, x, *args):
        y = begin(kind, x, *args)
        if x.shape[-1] == EMBED and x.ndim == 4 and kind in ("all-gather", "reduce-scatter"):  # tokens
            under_way[id(y)] = y
            watched.note("begin")
        return y

    def noted_end(y):
        if under_way.pop(id(y), None) is not None:
            watched.note("end")
        return end(y)

    with pytest.MonkeyPatch.context() as patch, watched:
        patch.setattr(collectives, "begin", noted_begin)
        patch.setattr(collectives, "end", noted_end)
        return step(overlap, backend="all-gather"), watched.events


def test_gathered_tokens_are_under_way_while_the_other_microbatch_computes():
    (values, both), (same, plain) = (processes(2).run(events_of_gathers, mode)[0] for mode in ("pairs", "none"))
    assert all(not some for some in hidden(plain)) and len(hidden(plain)) == 8 * LAYERS
    assert all(hidden(both)) and len(hidden(both)) == 8 * LAYERS
    for a, b in zip(values, same, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


def events_of_shared(backend):
    """With an expert that every token has: the values, what happens in one microbatch, and the values by every expert for every
    token."""
    with Watched() as watched:
        values = step("none", shared=True, backend=backend)
    return values, [what for what, _ in watched.events], step("none", shared=True, backend="dense")


@pytest.mark.parametrize("backend", ["all-to-all", "padded"])
def test_a_shared_expert_is_computed_while_rows_travel(backend):
    """Between the issue of their exchange and the wait for it, and its backward beside that of their gradients."""
    values, log, want = processes(2).run(events_of_shared, backend)[0]
    forward = ["mix", "begin", "shared", "end", "experts", "begin", "end"] * LAYERS
    layer = ["begin", "end", "experts back", "begin", "shared back", "end", "mix back"]
    assert log == [*forward, "head", "head back", *layer * LAYERS] * 2
    for a, b in zip(values, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


DELAY = 0.02


def seconds(overlap, delay):
    """(seconds of a step, those of them that it stood still for exchanges, how often it waited for rows)."""
    torch.distributed.barrier()
    with Watched(delay, 1.3 * DELAY) as watched:
        began = time.monotonic()
        step(overlap)
        took = time.monotonic() - began
    return took, watched.waited, sum(what == "end" for what, _ in watched.events)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_delayed_exchanges_are_hidden(world):
    """In 1f1b half of them: the first forward and the last backward have nothing beside them."""

    def waited(overlap):
        found = processes(world).run(seconds, overlap, DELAY)
        assert {count for *_, count in found} == {8 * LAYERS}
        return max(waited for _, waited, _ in found) / (8 * LAYERS * DELAY)

    assert waited("none") > 0.7 and waited("pairs") < 0.2 and waited("1f1b") < 0.6


@pytest.mark.slow  # of time that other work on the machine takes too
def test_a_step_grows_by_less_than_its_delays():
    """The least of some runs, as other work on the machine only adds."""

    def growth(overlap):
        quick, slow = [], []
        for _ in range(3):
            quick.append(max(t for t, *_ in processes(2).run(seconds, overlap, 0.0)))
            slow.append(max(t for t, *_ in processes(2).run(seconds, overlap, DELAY)))
        return (min(slow) - min(quick)) / (8 * LAYERS * DELAY)

    assert any(growth("pairs") < 0.6 for _ in range(3)) and any(growth("none") > 0.75 for _ in range(3))


# ---------------------------------------------------------------------------------------------------------- pipelines


def through_stages(overlap):
    """([value, *gradients], the events of the exchanges) of a step of DualPipe-V, whose pairs are joined."""
    layout = Layout.parse("pp=2,dp=2 ep=2 micro=5 schedule=dualpipev")
    model = dataclasses.replace(MODEL, config=dataclasses.replace(MODEL.config, layers=4))
    program = Program(model)
    mesh = program.mesh(layout)
    sh = program.sharding(layout, DOUBLE, mesh=mesh)
    f = pipeline(model, make_schedule("dualpipev", 2, layout.micro), mesh=mesh, overlap=overlap)
    params = sh.shard_params(f.held(program.params_of(model.spec(), torch.float64)), f.spec)
    with Watched() as watched:
        (value, _), grads = f(params, shard_batch(program.batch_of(layout), sh), fm.Ctx(sh=sh, key=fm.key(0)))
    return [value, *(t.full_tensor() if hasattr(t, "full_tensor") else t for t in tree.leaves(grads))], watched.events


def test_joined_pairs_of_a_pipeline_take_turns():
    """Exchanges of both are under way at once, and nothing else changes."""
    both, plain = (processes(4).run(through_stages, overlap) for overlap in (True, False))
    for (got, log), (want, other) in zip(both, plain, strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)
        assert {name for _, name in log} == {"a", "b"} and {name for _, name in other} == {"a"}
        at_once = [a == b == "begin" for (a, _), (b, _) in itertools.pairwise(log)]
        assert sum(at_once) >= 4 and not any(a == b == "begin" for (a, _), (b, _) in itertools.pairwise(other))


# ------------------------------------------------------------------------------------------------------------- mutants


def with_edits(edits, overlap):
    with applied(edits):
        exchange.begin_rows.__dict__.clear()
        return step(overlap)


@pytest.mark.parametrize("mutant", INTERLEAVE_MUTANTS, ids=lambda m: m.name)
def test_a_mutant_is_caught(mutant):
    """By a finite difference; without overlap all is equal."""
    (want, _), (same, _), (found, _) = (
        processes(2).run(with_edits, *args) for args in (((), "pairs"), (mutant.edits, "none"), (mutant.edits, "pairs"))
    )
    off = [max(float((a - b).norm() / b.norm()) for a, b in zip(some, want, strict=True)) for some in (same, found)]
    assert off[0] < 1e-13 and 1e-3 < off[1] < 1e6, off


def test_a_mutant_of_the_order_is_caught_by_its_events():
    log, _ = processes(2).run(events, "pairs", WAITING.edits)
    assert not any(hidden(log))


# --------------------------------------------------------------------------------------------------------- simulation


@pytest.mark.parametrize("exchange_time", [0.0, 0.5, 1.0])
def test_two_programs_of_equal_segments_wait_for_the_last_exchange_alone(exchange_time):
    for n in (1, 2, 8):
        some = [(1.0, exchange_time)] * n
        assert turns_time(some, some) == pytest.approx(2 * n + exchange_time)
        assert turns_time([*some, *some], []) == pytest.approx(2 * n * (1 + exchange_time))


def test_longer_exchanges_are_the_time():
    """One channel for both: the first segment, and then all exchanges one after the other."""
    for n in (1, 5):
        some = [(1.0, 3.0)] * n
        assert turns_time(some, some) == pytest.approx(1 + 2 * n * 3)


def test_the_cost_of_a_joined_pair_is_the_limit_of_many_segments():
    for f, b, x in ((1.0, 2.0, 0.5), (1.0, 2.0, 2.0), (1.0, 1.0, 3.0)):
        n = 1000
        time_ = turns_time([(f / n, x / n)] * n, [(b / n, x / n)] * n)
        costs = with_exchange(Costs(f, b / 2, b / 2), x)
        assert time_ == pytest.approx(costs.overlapped, abs=0.01)
        assert (costs.forward, costs.backward_input, costs.backward_weight) == (f + x, b / 2 + x, b / 2)


def test_pairs_of_dualpipev_hide_exchanges():
    """Each further microbatch costs every rank its computing alone, where without overlap it costs four exchanges more:
    of a forward and a backward in each of its two stages."""

    def each(costs):
        return (
            simulate(make_schedule("dualpipev", 4, 21), costs).makespan
            - simulate(make_schedule("dualpipev", 4, 20), costs).makespan
        )

    x = 0.5
    assert each(parse_costs(f"f=1,b=1,w=1,a2a={x}")) == pytest.approx(2 * 3)
    assert each(parse_costs(f"f=1,b=1,w=1,a2a={x},fb={3 + 2 * x}")) == pytest.approx(2 * 3 + 4 * x)
    plain = simulate(make_schedule("1f1b", 4, 8), parse_costs(f"f=1,b=1,w=1,a2a={x}"))
    assert plain.makespan == pytest.approx((8 + 3) * (3 + 2 * x))  # with nothing joined all of them are waited for
    with pytest.raises(UserError, match="a2a is one number, not one per stage"):
        parse_costs("a2a=1:2")
    with pytest.raises(UserError, match="give f, b and w one number each"):
        parse_costs("f=1:2,a2a=1")
