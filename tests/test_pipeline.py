"""Pipelines on real processes: every schedule equals one device in float64."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from fmegatron import Ctx, Sharding, abstract, accumulate, checkpoint, cli, init, job, key, make_mesh, optim
from fmegatron.accumulate import Term, Weight
from fmegatron.errors import UserError
from fmegatron.initializers import normal
from fmegatron.models import Decoder
from fmegatron.optim import global_norm
from fmegatron.parallel import pipeline as pipeline_module
from fmegatron.parallel import schedule_text
from fmegatron.parallel.pipeline import Ends, Pipeline, find_ends, inside_stage, pipeline
from fmegatron.parallel.schedule_check import ScheduleError
from fmegatron.parallel.schedule_communication import with_communication
from fmegatron.parallel.schedule_placing import place_weights
from fmegatron.parallel.schedule_simulation import Costs, simulate
from fmegatron.parallel.schedules import SCHEDULES, Action, Schedule, make_schedule
from fmegatron.parallel.stages import parse_layout
from fmegatron.precision import Precision
from fmegatron.primitives import embedding, linear_cross_entropy
from fmegatron.rules import Rules, standard_rules
from fmegatron.spec import Param
from fmegatron.step import TrainState, evaluate, train_step
from fmegatron.testing.models import small_config
from fmegatron.tree import named
from fmegatron.zero import with_sharded_state
from tests.processes import processes
from tests.test_train import start
from tests.train_runs import flags, go, losses, rows, write_corpus

FLOAT64 = Precision(params=torch.float64)
ROWS, SEQ, STEPS = 8, 6, 3


@dataclasses.dataclass(frozen=True)
class Case:
    """A pipeline to compare with one device. rules: options of `standard_rules`."""

    schedule: str
    mesh: str = "pp=2"
    microbatches: int = 4
    virtual: int | None = None
    assignment: str | None = None
    rows: int = ROWS
    model: tuple[tuple[str, Any], ...] = ()
    masked: bool = True
    rules: tuple[tuple[str, Any], ...] = ()

    def decoder(self) -> Decoder:
        return Decoder(small_config("llama", **{"layers": 4, "heads": 4, "kv_heads": 2, **dict(self.model)}))

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """Whole, with a mask that leaves microbatches very different numbers of tokens."""
        draw = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 48, (2, self.rows, SEQ), generator=draw)
        batch = {"tokens": tokens[0], "labels": tokens[1]}
        if self.masked:
            kept = torch.arange(SEQ) < 1 + (torch.arange(self.rows) * 5 % SEQ)[:, None]
            batch["mask"] = kept.long()
        return batch


def optimizer_of(spec: Any, sh: Sharding) -> Any:
    return with_sharded_state(optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2)), spec, sh)


def whole(tree: Any) -> dict[str, torch.Tensor]:
    """{name: global value}."""
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in named(tree).items() if t is not None}


def reference(case: Case) -> dict[str, Any]:
    """On one device, in one microbatch."""
    model, sh = case.decoder(), Sharding(precision=FLOAT64)
    spec = model.spec()
    params = init(spec, key(0), sh=sh)
    (total, metrics), grads = accumulate(model.loss, weights=model.weights)(
        params, case.batch(0), Ctx(sh=sh, key=key(7))
    )
    optimizer = optimizer_of(spec, sh)
    step = train_step(model.loss, optimizer, weights=model.weights, sh=sh)
    state, seen = TrainState(0, params, optimizer.init(params), key(1)), []
    for n in range(STEPS):
        state, found = step(state, case.batch(n))
        seen.append((found["loss"], found["grad_norm"], found["param_norm"], found["tokens"]))
    return {
        "total": total,
        "metrics": metrics,
        "grads": whole(grads),
        "norm": global_norm(grads),
        "steps": seen,
        "params": whole(state.params),
        "opt": whole(state.opt),
        "evaluated": evaluate(model.loss, weights=model.weights, sh=sh)(params, case.batch(9)),
    }


def made(case: Case) -> tuple[Decoder, Pipeline, Sharding]:
    model = case.decoder()
    mesh = make_mesh(case.mesh, device="cpu", kv_heads=2)
    whole_sh = Sharding(mesh, standard_rules(mesh, **dict(case.rules)), precision=FLOAT64)
    schedule = make_schedule(case.schedule, mesh.sizes["pp"], case.microbatches, virtual=case.virtual)
    assignment = None if case.assignment is None else parse_layout(case.assignment)
    pipe = pipeline(model, schedule, mesh=mesh, assignment=assignment)
    return model, pipe, inside_stage(whole_sh, model.spec())


def on_ranks(case: Case) -> dict[str, Any]:
    """What one rank has."""
    model, pipe, sh = made(case)
    shard = lambda batch: {n: sh.shard(x, "batch seq") for n, x in batch.items()}  # noqa: E731
    params = init(pipe.spec, key(0), sh=sh)
    (total, metrics), grads = pipe(params, shard(case.batch(0)), Ctx(sh=sh, key=key(7)))
    log, program = list(pipe.log), [str(a) for a in pipe.table.programs[pipe.rank]]
    optimizer = optimizer_of(pipe.spec, sh)
    step = train_step(model.loss, optimizer, sh=sh, spec=pipe.spec, gradients=pipe, donate=True)
    state, seen = TrainState(0, init(pipe.spec, key(0), sh=sh), optimizer.init(params), key(1)), []
    for n in range(STEPS):
        state, found = step(state, shard(case.batch(n)))
        seen.append((found["loss"], found["grad_norm"], found["param_norm"], found["tokens"]))
    return {
        "rank": pipe.rank,
        "total": total,
        "metrics": metrics,
        "grads": whole(grads),
        "norm": pipe.norm(grads),
        "steps": seen,
        "params": whole(state.params),
        "opt": whole(state.opt),
        "evaluated": pipe.evaluate(params, shard(case.batch(9)), Ctx(sh=sh)),
        "log": log,
        "program": program,
        "held": sum(t.numel() for t in named(sh.local(params)).values()),
    }


def close(got: torch.Tensor, want: torch.Tensor, what: str, least: float = 0.0) -> None:
    got, want = torch.as_tensor(got), torch.as_tensor(want)
    assert got.shape == want.shape and got.dtype == want.dtype, what
    error, size = (got - want).double().norm(), want.double().norm()
    assert error <= 1e-10 * max(float(size), least), f"{what}: {float(error)} of {float(size)}"


def compare(case: Case, world: int) -> list[dict[str, Any]]:
    """Runs a case and compares all ranks with one device."""
    want, found = reference(case), processes(world).run(on_ranks, case)
    least = 1e-3 * float(want["norm"]) / len(want["grads"]) ** 0.5
    for rank, got in enumerate(found):
        assert got["log"] == got["program"], f"rank {rank}: the log is not the table"
        assert torch.equal(got["total"], found[0]["total"]) and torch.equal(got["norm"], found[0]["norm"])
        close(got["total"], want["total"], "total")
        for part in ("terms", "sums", "weights"):
            close(got["metrics"][part]["lm"], want["metrics"][part]["lm"], part)
        for name, value in got["grads"].items():
            close(value, want["grads"][name], f"rank {rank}: gradient of {name}", least)
        close(got["norm"], want["norm"], "norm")
        for n, (a, b) in enumerate(zip(got["steps"], want["steps"], strict=True)):
            for what, x, y in zip(("loss", "grad_norm", "param_norm", "tokens"), a, b, strict=True):
                close(x, y, f"{what} of step {n}")
        for what in ("params", "opt"):
            for name, value in got[what].items():
                close(value, want[what][name], f"rank {rank}: {what} {name}")
        for x, y in zip(got["evaluated"]["lm"], want["evaluated"]["lm"], strict=True):
            close(x, y, "evaluation")
    for what in ("grads", "params", "opt"):
        assert {n for got in found for n in got[what]} == set(want[what]), f"{what} that nobody holds"
    return found


TWO = [
    Case("gpipe"),
    Case("1f1b"),
    Case("interleaved", virtual=2),
    Case("bfs", virtual=2),
    Case("zbh1"),
    Case("zbv"),
    Case("dualpipev"),
]


@pytest.mark.parametrize("case", TWO, ids=lambda c: c.schedule)
def test_every_schedule_equals_one_device_on_two_ranks(case: Case) -> None:
    compare(case, 2)


FOUR = [
    Case("gpipe", "pp=4", model=(("tied", True), ("dropout", 0.3))),
    Case("1f1b", "pp=4", 5, rows=7, model=(("tied", True),)),
    Case("interleaved", "pp=4", 6, 2, "Ett||t||t||L|", model=(("dropout", 0.3),)),
    Case("bfs", "pp=4", 3, 2, "|Et|t||t|||tL", model=(("tied", True),)),
    Case("zbh1", "pp=4", 5, rows=6, model=(("tied", True), ("dropout", 0.3))),
    Case("zbv", "pp=4", 6, model=(("tied", True),)),
    Case("dualpipev", "pp=4", 8, model=(("dropout", 0.3),)),
]


@pytest.mark.parametrize("case", FOUR, ids=lambda c: c.schedule)
def test_every_schedule_equals_one_device_on_four_ranks(case: Case) -> None:
    """With tied embeddings, dropout, microbatches that are no multiple of anything, and empty stages."""
    compare(case, 4)


INSIDE = [
    Case("zbv", "pp=2,tp=2", 3, model=(("tied", True), ("dropout", 0.3))),
    Case("1f1b", "pp=2,tp=2", 3, rules=(("sequence_parallel", True),), model=(("tied", True),)),
    Case("1f1b", "pp=2,dp=2", 3, rules=(("zero", 1),), model=(("tied", True), ("dropout", 0.3))),
    Case("zbh1", "dp=2,pp=2", 4, rules=(("zero", 2),), model=(("tied", True),)),
    Case("dualpipev", "pp=2,dp=2", 4, rules=(("zero", 3),), model=(("tied", True),)),
    Case("interleaved", "pp=2,dp=2", 4, 2, rules=(("zero", 3),), model=(("tied", True),)),
    Case("gpipe", "tp=2,pp=2", 3, rules=(("sequence_parallel", True),), model=(("tied", True),)),
    Case("bfs", "pp=2,dp=2", 3, 2, rules=(("zero", 1),)),
]
EIGHT = [
    *(
        Case(s, "pp=2,dp=2,tp=2", 4, rules=(("zero", z), ("sequence_parallel", z > 1)))
        for z, s in enumerate(SCHEDULES, 1)
        if z < 4
    ),
    *(Case(s, "pp=4,tp=2", 5, model=(("tied", True),)) for s in list(SCHEDULES)[3:5]),
    *(Case(s, "pp=4,dp=2", 8, rows=16, rules=(("zero", 3),), model=(("tied", True),)) for s in list(SCHEDULES)[5:]),
]


@pytest.mark.parametrize("case", INSIDE, ids=lambda c: f"{c.schedule}-{c.mesh}-{dict(c.rules)}")
def test_tensor_parallelism_and_zero_inside_stages(case: Case) -> None:
    compare(case, 4)


@pytest.mark.slow
@pytest.mark.parametrize("case", EIGHT, ids=lambda c: f"{c.schedule}-{c.mesh}-{dict(c.rules)}")
def test_tensor_parallelism_and_zero_inside_stages_on_eight_ranks(case: Case) -> None:
    compare(dataclasses.replace(case, model=(*case.model, ("layers", 8))), 8)


class Failing:
    """A decoder whose block fails on one rank, in the second microbatch."""

    def __init__(self, model: Decoder, rank: int, error: Exception) -> None:
        self.model, self.rank, self.error, self.calls = model, rank, error, 0
        self.stack = self.run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def run(self, p: Any, x: Any, ctx: Ctx) -> Any:
        self.calls += 1
        if self.calls == 2 and torch.distributed.get_rank() == self.rank:
            raise self.error
        return self.model._stack(p, x, ctx)


def failing_on(rank: int, error: Exception) -> tuple[str, str, float]:
    """(type, message of what this rank raises, seconds until it does)."""
    model = Case("1f1b").decoder()
    mesh = make_mesh("pp=4", device="cpu")
    pipe = pipeline(Failing(model, rank, error), make_schedule("1f1b", 4, 6), mesh=mesh)
    sh = inside_stage(Sharding(mesh, standard_rules(mesh), precision=FLOAT64), model.spec())
    params = init(pipe.spec, key(0), sh=sh)
    began = time.monotonic()
    try:
        pipe(params, Case("1f1b").batch(0), Ctx(sh=sh))
    except Exception as raised:
        return type(raised).__name__, str(raised), time.monotonic() - began
    return "nothing", "", 0.0


@pytest.mark.parametrize(
    ("error", "elsewhere"), [(ZeroDivisionError("one rank"), "RankFailed"), (UserError("a wrong block"), "UserError")]
)
def test_an_error_on_one_rank_ends_all_with_its_traceback(error: Exception, elsewhere: str) -> None:
    pool = processes(4)
    found = pool.run(failing_on, 2, error)
    pool.close()  # messages of the step that failed may be under way
    for rank, (kind, message, seconds) in enumerate(found):
        assert seconds < 20
        assert str(error) in message
        assert kind == (type(error).__name__ if rank == 2 else elsewhere)
        if elsewhere == "RankFailed" and rank != 2:
            assert "rank 2 failed" in message and "in run" in message


def test_sizes_that_do_not_fit_are_refused() -> None:
    model, mesh = Case("1f1b").decoder(), make_mesh("pp=1", device="cpu")
    with pytest.raises(UserError, match="has 2 ranks, but mesh axis 'pp' has 1"):
        pipeline(model, make_schedule("1f1b", 2, 4), mesh=mesh)
    with pytest.raises(UserError, match="assignment has 2 stages"):
        pipeline(model, make_schedule("1f1b", 1, 4), mesh=mesh, assignment=parse_layout("Ett|ttL"))
    with pytest.raises(UserError, match="each of the model's 4 layers once"):
        pipeline(model, make_schedule("1f1b", 1, 4), mesh=mesh, assignment=parse_layout("EttL"))
    missing = Schedule("missing", (0,), 1, ((Action("F", 0, 0),),))
    with pytest.raises(ScheduleError, match="never does 0B0"):
        pipeline(model, missing, mesh=mesh)
    pipe = pipeline(model, make_schedule("1f1b", 1, 4), mesh=mesh)
    with pytest.raises(UserError, match="structure of this rank's spec"):
        pipe({"embed": torch.zeros(1)}, Case("1f1b").batch(0))
    with pytest.raises(UserError, match="names the axis 'pp', on which the layers lie"):
        inside_stage(Sharding(mesh, Rules({"batch": "pp"})), model.spec())


def test_a_pipeline_of_one_rank_equals_accumulate() -> None:
    """Stages on one rank hand over without messages; the embedding, tied, is on both of them."""
    case = Case("zbv", "pp=1", 3, model=(("tied", True),))
    want, got = reference(case), on_ranks(case)
    for name, value in want["grads"].items():
        close(got["grads"][name], value, name, 1e-3 * float(want["norm"]))
    close(got["norm"], want["norm"], "norm")
    assert got["log"] == got["program"]


def test_ends_are_what_embed_and_head_read() -> None:
    tied, untied = (Case("1f1b", model=(("tied", t),)).decoder() for t in (True, False))
    assert find_ends(tied) == Ends(("embed",), ("embed", "norm")) and find_ends(tied).tied == ("embed",)
    assert find_ends(untied) == Ends(("embed",), ("norm", "head"))


def saved(case: Case, folder: str) -> None:
    """Trains a step and saves, on a mesh."""
    model, pipe, sh = made(case)
    optimizer = optimizer_of(pipe.spec, sh)
    step = train_step(model.loss, optimizer, sh=sh, spec=pipe.spec, gradients=pipe)
    params = init(pipe.spec, key(0), sh=sh)
    state = TrainState(0, params, optimizer.init(params), key(1))
    state, _ = step(state, {n: sh.shard(x, "batch seq") for n, x in case.batch(0).items()})
    checkpoint.save(folder, state, step=1)


def loaded(case: Case, folder: str) -> dict[str, torch.Tensor]:
    """What this rank reads of it, whole."""
    _, pipe, sh = made(case)
    params = abstract(pipe.spec, sh=sh)
    like = TrainState(0, params, optimizer_of(pipe.spec, sh).init(params), key(0))
    state = checkpoint.load(folder, like)
    return {f"{what} {n}": t for what in ("params", "opt") for n, t in whole(getattr(state, what)).items()}


def test_checkpoints_move_between_pipelines_and_one_device(tmp_path) -> None:
    """Names are global: what pp=2,tp=2 saved is read by pp=4 with two stages a rank, pp=2,dp=2 with ZeRO-1, and no mesh."""
    tied = (("tied", True),)
    first = Case("zbv", "pp=2,tp=2", model=tied)
    processes(4).run(saved, first, str(tmp_path))
    model, sh = first.decoder(), Sharding(precision=FLOAT64)
    spec = model.spec()
    params = abstract(spec, sh=sh)
    like = TrainState(0, params, optimizer_of(spec, sh).init(params), key(0))
    found = checkpoint.load(tmp_path, like)
    want = {f"{what} {n}": t for what in ("params", "opt") for n, t in whole(getattr(found, what)).items()}
    others = (
        Case("interleaved", "pp=4", 4, 2, model=tied),
        Case("1f1b", "pp=2,dp=2", model=tied, rules=(("zero", 1),)),
    )
    for case in others:
        got = processes(4).run(loaded, case, str(tmp_path))
        assert set().union(*got) == set(want)
        for part in got:
            for name, value in part.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(want[name])), name


class Plain:
    """A model of one's own: no context, no stack, and a term that blocks put into the carry, which is a tree."""

    def spec(self) -> Any:
        layer = {
            "w": Param((8, 8), "embed out", normal(0.5), over="batch seq"),
            "unused": Param((3,), "three", over=""),
        }
        table = Param((48, 8), "vocab embed", normal(0.5), over="batch seq")
        return {"table": table, "layers": dict.fromkeys(range(3), layer)}

    def embed(self, params: Any, batch: Any, ctx: Ctx) -> Any:
        x = embedding(ctx.sh.use(params["table"], self.spec()["table"]), batch["tokens"], sh=ctx.sh, vocab_size=48)
        return {"x": x, "penalty": x.new_zeros(x.shape[0]), "layers": torch.zeros((), dtype=torch.int64)}

    def block(self, p: Any, carry: Any, ctx: Ctx) -> Any:
        y = ctx.sh.dot(carry["x"], p["w"], "batch seq embed, embed out -> batch seq out").tanh()
        return {
            "x": carry["x"] + y,
            "penalty": carry["penalty"] + y.square().mean((1, 2)),
            "layers": carry["layers"] + 1,
        }

    def head(self, params: Any, carry: Any, batch: Any, ctx: Ctx) -> Any:
        table = ctx.sh.use(params["table"], self.spec()["table"])
        h = ctx.sh(carry["x"], "batch seq embed -> batch seq embed | vocab")
        equation = "batch seq embed, vocab embed -> batch seq vocab"
        each = linear_cross_entropy(h, table, batch["labels"], equation=equation, sh=ctx.sh, vocab_size=48)
        stats = {"rows": Term(torch.ones_like(carry["penalty"]), "batch"), "layers": carry["layers"]}
        return {"lm": Term(each, "batch seq"), "penalty": Term(carry["penalty"], "batch")}, stats

    def weights(self, batch: Any) -> Any:
        ones = torch.ones_like(batch["labels"])
        return {"lm": Weight(ones, "batch seq"), "penalty": Weight(float(len(ones)), "", 0.3)}

    def loss(self, params: Any, batch: Any, ctx: Ctx) -> Any:
        carry = self.embed(params, batch, ctx)
        for layer in params["layers"].values():
            carry = self.block(layer, carry, ctx)
        return self.head(params, carry, batch, ctx)


def plain_on_ranks(name: str) -> Any:
    model, mesh = Plain(), make_mesh("pp=2", device="cpu")
    rules = Rules({n: None for n in ("batch", "seq", "vocab", "embed", "out", "three")})
    pipe = pipeline(model, make_schedule(name, 2, 3), mesh=mesh)
    sh = inside_stage(Sharding(mesh, rules, precision=FLOAT64), model.spec())
    params = init(pipe.spec, key(0), sh=sh)
    (total, metrics), grads = pipe(params, Case("1f1b").batch(0), Ctx(sh=sh), loss_scale=64.0)
    return total, metrics, whole(grads)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_model_of_ones_own_with_a_tree_for_a_carry(name: str) -> None:
    model, sh = Plain(), Sharding(precision=FLOAT64)
    params = init(model.spec(), key(0), sh=sh)
    ctx, batch = Ctx(sh=sh), Case("1f1b").batch(0)
    (total, metrics), grads = accumulate(model.loss, weights=model.weights)(params, batch, ctx)
    found = processes(2).run(plain_on_ranks, name)
    assert set().union(*(got[2] for got in found)) == set(whole(grads))
    for value, seen, own in found:
        close(value, total, "total")
        close(seen["terms"]["penalty"], metrics["terms"]["penalty"], "penalty")
        assert seen["stats"]["rows"] == metrics["stats"]["rows"] and seen["weights"]["penalty"] == ROWS
        assert seen["stats"]["layers"] == 3 * 3  # of three microbatches
        for n, g in own.items():
            close(g, whole(grads)[n], n)


KINDS = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}


def napping(name: str, microbatches: int, tries: int, nap: float) -> list[tuple[float, float]]:
    """(seconds of a step, of them computing) of some steps whose actions take naps of known lengths, in seconds."""
    ranks = torch.distributed.get_world_size()
    model, mesh = Plain(), make_mesh(f"pp={ranks}", device="cpu")
    rules = Rules({n: None for n in ("batch", "seq", "vocab", "embed", "out", "three")})
    pipe = pipeline(model, make_schedule(name, ranks, microbatches), mesh=mesh)
    sh = inside_stage(Sharding(mesh, rules, precision=FLOAT64), model.spec())
    params, batch = init(pipe.spec, key(0), sh=sh), Case("1f1b", rows=microbatches).batch(0)
    training, busy, found = pipeline_module._Training, [0.0], []
    plain = {n: getattr(training, n) for n in (*KINDS, "take_input", "take_gradient")}

    def timed(n: str) -> Any:
        def run(self: Any, s: int, m: int) -> Any:
            began = time.monotonic()
            y = plain[n](self, s, m)
            if n in KINDS:
                time.sleep(KINDS[n] * nap)
            took = time.monotonic() - began
            busy[0] += took if n in KINDS else -took  # waiting is no computing
            return y

        return run

    try:
        for n in plain:
            setattr(training, n, timed(n))
        for _ in range(tries):
            busy[0] = 0.0
            torch.distributed.barrier()
            began = time.monotonic()
            pipe(params, batch, Ctx(sh=sh))
            found.append((time.monotonic() - began, busy[0]))
    finally:
        for n, f in plain.items():
            setattr(training, n, f)
    return found


def bubbles(name: str, ranks: int, microbatches: int, tries: int, nap: float) -> tuple[list[float], float]:
    """The measured bubble of each step, the least first, and the simulator's."""
    costs = Costs(forward=nap, backward_input=nap, backward_weight=nap, communication=0.0)
    want = simulate(with_communication(make_schedule(name, ranks, microbatches)), costs).bubble
    found = []
    for step in zip(*processes(ranks).run(napping, name, microbatches, tries, nap), strict=True):
        work = max(busy for _, busy in step)
        found.append((max(seconds for seconds, _ in step) - work) / work)
    return sorted(found), want


@pytest.mark.parametrize("name", ["1f1b", "zbh1"])
def test_the_bubble_of_two_stages_that_take_known_times_is_the_simulators(name: str) -> None:
    """Of the step that was least disturbed: what else runs on the machine only makes it larger."""
    found, want = bubbles(name, 2, 3, 3, 0.1)
    assert min(abs(b - want) for b in found) < 0.05 and found[0] > want - 0.05, (found, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_of_stages_that_take_known_times_is_the_simulators(name: str) -> None:
    found, want = bubbles(name, 4, 8, 4, 0.2)
    assert abs(found[0] - want) < 0.05, (found, want)


def trained(arguments: list[str], resumed: list[str]) -> list[int | str]:
    """The exit codes of a run that stops behind its third step, and of its resumption."""
    return [go(arguments, (3, "SIGTERM")), go(resumed)]


@pytest.mark.parametrize(
    ("mesh", "schedule"), [("pp=2,tp=2", "zbv"), pytest.param("pp=4", "1f1b", marks=pytest.mark.slow)]
)
def test_the_command_line_has_the_losses_of_one_process(tmp_path, mesh: str, schedule: str) -> None:
    """Also when the run goes on from a checkpoint, and for what is held out."""
    corpus = write_corpus(tmp_path / "text.jsonl")
    common = {"steps": 6, "precision_params": "float64", "eval_every": 2}
    one, several = tmp_path / "one", tmp_path / "several"
    assert go(flags(corpus, one, "--model-overrides.layers", 3, **common)) == 0
    arguments = flags(
        corpus,
        several,
        "--model-overrides.layers",
        3,
        "--mesh",
        mesh,
        "--schedule",
        schedule,
        **common,
        batch_microbatches=4,
    )
    table = tmp_path / "table.txt"  # goes on with a table of one's own
    ranks = int(mesh[3])
    placed = place_weights(make_schedule(schedule, ranks, 4), Costs(backward_input=1.4, backward_weight=0.6))
    table.write_text(schedule_text.format(placed))
    codes = processes(4).run(trained, arguments, ["--out", str(several), "--resume", "--schedule", str(table)])
    assert codes == [[0, 0]] * 4
    torch.testing.assert_close(losses(several), losses(one), rtol=1e-10, atol=0)
    held_out = [[row["val_loss"] for row in rows(out) if "val_loss" in row] for out in (one, several)]
    torch.testing.assert_close(held_out[1], held_out[0], rtol=1e-10, atol=0)


@pytest.mark.parametrize(("mesh", "world"), [("pp=2", 2), pytest.param("pp=2,tp=2", 4, marks=pytest.mark.slow)])
def test_the_true_command_has_the_losses_of_one_process(tmp_path, mesh, world) -> None:
    """Several processes; only the first prints."""
    corpus = write_corpus(tmp_path / "text.jsonl")
    sizes, common = ("--model-overrides.layers", 3), {"steps": 3, "precision_params": "float64"}
    one, several = tmp_path / "one", tmp_path / "several"
    assert go(flags(corpus, one, *sizes, **common)) == 0
    given = flags(corpus, several, *sizes, "--nproc", world, "--mesh", mesh, "--schedule", "zbv", **common)
    process = start("fmegatron", "train", *given, "--batch.microbatches", 4, cwd=tmp_path)
    printed, errors = process.communicate(timeout=180)
    assert process.returncode == 0 and errors == "", errors
    assert printed == (several / "log.txt").read_text()
    torch.testing.assert_close(losses(several), losses(one), rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--schedule", "zbv"), "--schedule zbv is for a mesh with pp"),
        (("--mesh", "pp=2", "--nproc", "2", "--schedule", "gpipe", "--virtual", "3"), "virtual=3"),
        (("--mesh", "pp=2", "--nproc", "2", "--stages", "Et|t|tL"), "has 3 stages, but --schedule 1f1b on pp=2 has 2"),
        (
            ("--mesh", "pp=2", "--nproc", "2", "--schedule", "./none.txt"),
            "--schedule ./none.txt: ./none.txt cannot be read",
        ),
        (
            ("--mesh", "pp=2", "--nproc", "2", "--schedule", "mine.txt"),
            "the table has 2 microbatches, and the run 1: use --b",
        ),
        (("--mesh", "pp=2", "--nproc", "2", "--schedule", "zb"), "schedule 'zb' is none of gpipe"),
        (("--mesh", "pp=2", "--nproc", "2", "--debug"), "--debug does not work in a pipeline"),
    ],
)
def test_options_that_do_not_fit_are_refused(given: tuple[str, ...], message: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text(schedule_text.format(make_schedule("1f1b", 2, 2)))
    config = cli.parse_train([str(x) for x in ("--out", "run", "--device", "cpu", *given)])
    sizes = dataclasses.replace(small_config("llama"), layers=3)
    with pytest.raises(UserError, match=re.escape(message)):
        job.check(config, config.nproc, sizes)
