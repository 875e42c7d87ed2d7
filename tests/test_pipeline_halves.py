"""What a running stage does and keeps: an operation log of both halves of its backward, and the table's three sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fmegatron as fm
from fmegatron.models import Decoder
from fmegatron.parallel import pipeline as pipeline_module
from fmegatron.parallel.schedule_check import Residuals
from fmegatron.parallel.schedules import BACKWARD, FORWARD, INPUT, WEIGHT
from fmegatron.split import split
from fmegatron.testing.models import small_config
from fmegatron.tree import is_float, leaves, like, tensors, tree_map
from tests.processes import processes
from tests.test_pipeline import FLOAT64
from tests.test_pipeline_steps import batch, parts
from tests.test_transforms import Live

ROWS, SEQ = 1, 23  # as many tokens as no dim of the model has elements
DOING = {"forward": FORWARD, "backward": BACKWARD, "backward_input": INPUT, "backward_weight": WEIGHT}


def decoder(**changes: Any) -> Decoder:
    return Decoder(small_config("llama", **{"layers": 4, "heads": 4, "kv_heads": 2, **changes}))


# ------------------------------------------------------------------------------------------------- the operation log


class Products(TorchDispatchMode):
    """Appends to `log`, in order: (action, is it a product that gives a weight's gradient?, FLOPs) of every product of
    two tensors of which one is a parameter, or that sums over tokens; and what else is written there."""

    def __init__(self, params: Any, tokens: int) -> None:
        super().__init__()
        self.held = {t.untyped_storage()._cdata for t in tensors(params)[0]}
        self.tokens, self.action, self.log = tokens, "", []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name.split("::")[1] in ("mm", "bmm", "addmm", "baddbmm", "addmm_", "addbmm"):
            a, b = [t for t in args if isinstance(t, torch.Tensor)][-2:]
            if a.shape[-1] == self.tokens:
                self.log.append((self.action, True, 2 * a.numel() * b.shape[-1]))
            elif any(t.untyped_storage()._cdata in self.held for t in (a, b)):
                self.log.append((self.action, False, 2 * a.numel() * b.shape[-1]))
        return out


@contextlib.contextmanager
def told(before: Any, after: Any = lambda name: None) -> Iterator[None]:
    """before(action as text) and after(it) around what the pipelines of this process compute and send."""
    training = pipeline_module._Training
    plain = {n: getattr(training, n) for n in (*DOING, "communicate")}

    def around(name: str) -> Any:
        def run(self: Any, *args: Any) -> Any:
            what = f"{args[0]}{DOING[name]}{args[1]}" if name in DOING else " ".join(map(str, args[0]))
            before(what)
            y = plain[name](self, *args)
            after(what)
            return y

        return run

    try:
        for n in plain:
            setattr(training, n, around(n))
        yield
    finally:
        for n, f in plain.items():
            setattr(training, n, f)


def logged(name: str) -> tuple[list[Any], dict[int, Any]]:
    """On one rank: (the log of a step, {stage: FLOPs of plain autograd's backward of a microbatch}); FLOPs by
    products of both kinds."""
    model = decoder()
    pipe, sh = parts(model, name, 3)
    params = fm.init(pipe.spec, fm.key(0), sh=sh)
    data, seen = batch(SEQ, 3 * ROWS), Products(params, SEQ * ROWS)

    def before(what: str) -> None:
        seen.action = what
        if "SEND" in what or "RECV" in what:
            seen.log.append((what, None, 0))

    with told(before), seen:
        pipe(params, data, fm.Ctx(sh=sh))
    whole = {}
    for s in pipe.table.stages_of(pipe.rank):
        plain = Products(params, SEQ * ROWS)
        with told(before), plain, torch.enable_grad():
            run = pipeline_module._Training(pipe, Quiet(), params, data, fm.Ctx(sh=sh), None)
            mine = tree_map(lambda t: t.detach().requires_grad_(), run.mine[s])
            plain.held |= {t.untyped_storage()._cdata for t in leaves(mine)}
            x = None
            if pipe.carries(s - 1):
                x = tree_map(lambda t: torch.randn(t.shape, dtype=t.dtype, requires_grad=True), run.carry(0))
            y = pipe.stage(s)(mine, x, run.within(0))
            y = y[0] if s == pipe.last else y
            del plain.log[:]
            torch.autograd.grad(y, [*leaves(mine), *([] if x is None else leaves(x))], torch.ones_like(y))
        whole[s] = plain.log
    return seen.log, whole


class Quiet:
    """No alarm."""

    def check(self) -> None:
        """Nothing has failed."""


@pytest.mark.parametrize("name", ["zbh1", "zbv"])
def test_each_half_does_its_own_products_and_the_gradient_is_sent_before_the_weights(name: str) -> None:
    for rank, (log, plain) in enumerate(processes(2).run(logged, name)):
        inputs = [x for x in log if "I" in x[0] and x[1] is not None]
        weights = [x for x in log if "W" in x[0] and x[1] is not None]
        assert inputs and weights and not any(by_weight for _, by_weight, _ in inputs), f"rank {rank}"
        assert all(by_weight for _, by_weight, _ in weights), f"rank {rank}"
        for s, products in plain.items():
            want = sum(flops for *_, flops in products)
            for m in range(3):
                halves = sum(flops for what, _, flops in log if what in (f"{s}I{m}", f"{s}W{m}"))
                assert abs(halves - want) <= 0.02 * want, (rank, s, halves, want)
            for m in range(3) if s else ():
                sent = next((n for n, x in enumerate(log) if f"{s}SEND_B{m}" in x[0].split()), None)
                first = next(n for n, x in enumerate(log) if x[0] == f"{s}W{m}")
                assert sent is None or sent < first, (rank, s, m)


# ------------------------------------------------------------------------------------------------- the three sizes

LENGTH, MICROBATCHES = 64, 5


def one_microbatch(pipe: fm.Pipeline, run: Any, s: int) -> tuple[float, float, float]:
    """Bytes that a stage keeps for a microbatch: after F, after I, after W."""
    halves, mine = split(pipe.stage(s)), run.mine[s]
    with Live() as live:
        x = None
        if pipe.carries(s - 1):
            x = tree_map(lambda t: torch.randn(t.shape, dtype=t.dtype), run.carry(0))
        y, residual = halves.forward(mine, x, run.within(0), False, run.trainable[s])
        gy = tree_map(lambda t: torch.ones_like(t) if is_float(t) else None, y)
        if s == pipe.last:
            gy = like(y, [g if i == 0 else None for i, g in enumerate(leaves(gy))])
        own = sum(g.nbytes for g in leaves(gy) if g is not None)
        del x, y
        found = [live.now() - own]
        gx, left = halves.backward_input(residual, gy, mine)
        del residual, gx, gy
        found.append(live.now())
        halves.backward_weight(left)
        del left
        return found[0], found[1], live.now()


def sizes(name: str) -> tuple[dict[int, Any], list[tuple[str, int]], int, dict[int, int]]:
    """On one rank: ({stage: three sizes}, what is alive behind every action of a step, bytes of a stream, {stage: bytes
    of its parameters})."""
    pipe, sh = parts(decoder(), name, MICROBATCHES)
    params, data = fm.init(pipe.spec, fm.key(0), sh=sh), batch(LENGTH, MICROBATCHES)
    pipe(params, data, fm.Ctx(sh=sh))  # what is made once
    with torch.no_grad():
        run = pipeline_module._Training(pipe, Quiet(), params, data, fm.Ctx(sh=sh), None)
        each = {s: one_microbatch(pipe, run, s) for s in run.mine}
        stream, held = run.carry(0), {s: sum(t.nbytes for t in leaves(p)) for s, p in run.mine.items()}
    del run
    log: list[tuple[str, int]] = []
    with Live() as live, told(lambda what: None, lambda what: log.append((what, live.now()))):
        pipe(params, data, fm.Ctx(sh=sh))
    return each, log, sum(t.numel() * 8 for t in leaves(stream)), held


@pytest.mark.parametrize("name", ["zbh1", "zbv"])
def test_what_a_running_stage_keeps_is_what_the_table_says(name: str) -> None:
    """At every moment of a step: after F, after I and after W, of all microbatches that are under way; beside them the
    gradients so far, and messages."""
    schedule = fm.make_schedule(name, 2, MICROBATCHES)
    found = processes(2).run(sizes, name)
    each = {s: x for sizes_of, *_ in found for s, x in sizes_of.items()}
    assert all(after_weight <= 64 for *_, after_weight in each.values()), each
    residuals = Residuals(*(tuple(each[s][i] for s in sorted(each)) for i in (0, 1)))
    for rank, (_, log, stream, held) in enumerate(found):
        alive, begun = dict(log), set()
        table = gradients = 0.0
        for a in schedule.programs[rank]:
            table += residuals.change(a)
            if a.kind == WEIGHT and a.stage not in begun:
                begun.add(a.stage)
                gradients += held[a.stage]
            more = alive[str(a)] - table - gradients
            assert -0.02 * table <= more <= 0.02 * table + 5 * stream, (rank, str(a), alive[str(a)], table, gradients)
        assert table == 0 and max(residuals.after_forward) > 10 * stream  # type: ignore[arg-type]


def test_forward_and_joint_backward_keep_no_more_than_plain_autograd() -> None:
    """Of a stage with all parts of the model."""
    model = decoder()
    mesh = fm.make_mesh("pp=1", device="cpu")
    sh = fm.inside_stage(fm.Sharding(mesh, fm.standard_rules(mesh), precision=FLOAT64), model.spec())
    pipe = fm.pipeline(model, fm.make_schedule("1f1b", 1, 1), mesh=mesh)
    params, data = fm.init(pipe.spec, fm.key(0), sh=sh), batch(LENGTH)
    with torch.no_grad():
        run = pipeline_module._Training(pipe, Quiet(), params, data, fm.Ctx(sh=sh), None)
    halves, f = split(pipe.stage(0)), pipe.stage(0)
    mine = tree_map(lambda t: t.detach().requires_grad_(), run.mine[0])

    def plain() -> tuple[int, int, Any]:
        with Live() as live:
            (value, _), flat = f(mine, None, run.within(0)), leaves(mine)
            held = live.now()
            return held, live.peak, torch.autograd.grad(value, flat) and live.peak

    def ours() -> tuple[int, int, Any]:
        with Live() as live, torch.no_grad():
            y, residual = halves.forward(run.mine[0], None, run.within(0), True, run.trainable[0])
            held, first = live.now(), live.peak
            halves.backward(residual, like(y, [torch.ones_like(y[0]), *[None] * (len(leaves(y)) - 1)]), run.mine[0])
            return held, first, live.peak

    for got, want in zip(ours(), plain(), strict=True):
        assert got <= 1.001 * want
