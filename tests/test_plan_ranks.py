"""The planner against stages of pipelines on gloo processes: what they communicate, to the byte, and what they hold."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fmegatron import optim, tree
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.parallel import pipeline
from fmegatron.parallel.schedules import FORWARD, INPUT
from fmegatron.plan import Model, Setting, memory
from fmegatron.plan.communication import entries
from fmegatron.plan.memory import held_by, of_stages
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.recording import record_collectives
from fmegatron.spec import init, local_bytes
from fmegatron.step import TrainState, train_step
from fmegatron.testing.layout import Layout
from fmegatron.testing.ledger import summed_up
from fmegatron.testing.program import Program
from fmegatron.tree import leaves
from fmegatron.zero import with_sharded_state
from tests.processes import processes
from tests.test_plan import Alive

SIZES: dict[str, Any] = dict(vocab=96, embed=32, layers=4, heads=8, kv_heads=4, mlp=48)
CONFIGS = {
    "": DecoderConfig(**SIZES),
    "tied": DecoderConfig(**SIZES, tied=True),
    "wide": DecoderConfig(**{**SIZES, "embed": 128, "mlp": 96}),
}
ROWS, SEQ = 2, 32  # of a microbatch of a rank


def layout_of(line: str) -> Layout:
    layout = Layout.parse(line)
    return Layout.parse(f"{line} rows={ROWS * layout.data * layout.micro} seq={SEQ}")


def measured(line: str, config: str = "") -> dict[str, Any]:
    """Of a step of this rank: collectives and messages by (kind, axes), and bytes of what it holds; of residuals of layers and of the loss
    the most that were alive behind a forward or the first half of a backward."""
    torch.set_num_threads(1)
    layout, program = layout_of(line), Program(Decoder(CONFIGS[config]))
    made = program.on(layout)
    mesh = made.mesh(layout)
    sh, pipe = made.sharding(layout, Precision(), mesh=mesh), made.pipeline(layout, program.spec(), mesh)
    params = init(pipe.spec, key(0), sh=sh)
    pieces = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
    optimizer = with_sharded_state(pieces, pipe.spec, sh)
    state = TrainState(0, params, optimizer.init(params), key(0))
    batch = {n: sh.shard(torch.zeros(layout.batch, dtype=torch.int64), "batch seq") for n in ("tokens", "labels")}
    sent, gradients, most, gone = [0, 0], [0], [0], set[int]()

    def send(ops: list[Any]) -> Any:
        out = [p.tensor for p in ops if p.op is dist.isend and p.group is pipe.group]
        gone.update(t.untyped_storage()._cdata for t in out)
        sent[:] = sent[0] + len(out), sent[1] + sum(t.numel() * t.element_size() for t in out)
        return batched(ops)

    class Watched(pipeline._Training):
        def compute(self, action: Any) -> None:
            super().compute(action)
            self.settle()  # gradients under way are no residuals
            others = [*self.grads, self.inputs, self.gradients, self.outputs, self.sums.total]
            there = {t.untyped_storage()._cdata for t in _tensors(others)} | gone
            if action.kind not in (FORWARD, INPUT):
                return
            gc.collect()
            alive = {at: n for at, (ref, n) in live.refs.items() if n > 8 and at not in there and not ref.expired()}
            most[0] = max(most[0], sum(alive.values()))

        def run(self) -> Any:
            found = super().run()
            gradients[0] = local_bytes(found[1])
            return found

    batched, training = dist.batch_isend_irecv, pipeline._Training
    step = train_step(made.model.loss, optimizer, sh=sh, spec=pipe.spec, gradients=pipe)
    try:
        dist.batch_isend_irecv, pipeline._Training = send, Watched  # type: ignore[misc]
        with record_collectives() as found, Alive() as live:
            step(state, batch)
    finally:
        dist.batch_isend_irecv, pipeline._Training = batched, training  # type: ignore[misc]
    assert sh.mesh is not None
    moved = {(e.kind, e.axes): (e.bytes, e.sent) for e in summed_up(found, sh.mesh)}
    if sent[0]:
        moved["send", ("pp",)] = sent[1], sent[1]
    moments = [t for t in leaves(state.opt) if tree.is_float(t)]
    return {
        "moved": moved,
        "parameters": local_bytes(params),
        "gradients": gradients[0],
        "moments": local_bytes(moments),
        "kept": most[0],
    }


def _tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, pipeline.Arrival):
        x = x.tensors
    if hasattr(x, "x") and hasattr(x, "steps"):
        return _tensors(x.x)
    return [t for y in x for t in _tensors(y)] if isinstance(x, (list, tuple)) else []


def compare(line: str, config: str = "") -> None:
    layout = layout_of(line)
    model, s = Model(Decoder(CONFIGS[config])), Setting(layout, *layout.batch, Precision())
    stride = layout.world // layout.size("pp")
    for n, got in enumerate(processes(layout.world).run(measured, line, config)):
        rank = n // stride  # pp is the first axis
        want = {(e.kind, e.axes): (e.bytes, e.sent) for e in entries(model, s, rank=rank)}
        assert got["moved"] == want, (line, rank)
        found = memory(model, s, rank=rank)
        at_rest = of_stages(model, model.sharding(s), held_by(model, s, rank))
        gradients = 4 * (at_rest.state if layout.zero else at_rest.params)
        assert got["parameters"] == pytest.approx(found.parameters, rel=0.01)
        assert got["gradients"] == pytest.approx(gradients, rel=0.01)
        assert got["moments"] == pytest.approx(found.moments, rel=0.01)
        assert got["kept"] == pytest.approx(found.kept, rel=0.05), (line, rank)


# With micro=4 a step of two ranks is warm-up, steady state and end.
TWO = (
    ("pp=2 micro=4 remat=attention", "tied"),
    ("pp=2 micro=4 remat=nothing", ""),
    ("pp=2 micro=4 schedule=zbh1", ""),
    ("pp=2 micro=4 schedule=zbv remat=nothing", ""),
)
MORE = (
    ("pp=2 micro=4", ""),
    ("pp=2 micro=4 remat=attention", "wide"),
    ("pp=2 micro=4 remat=nothing", "wide"),
    ("pp=2,dp=2 zero=1 micro=2", ""),
    ("pp=2 micro=4 schedule=interleaved", ""),
    ("pp=2 micro=4 schedule=zbv", "tied"),
    ("pp=2 micro=4 schedule=dualpipev", ""),
    ("pp=2 micro=3 schedule=gpipe", ""),
    ("pp=2 micro=4 schedule=bfs", ""),
    ("pp=2,dp=2 zero=2 micro=2 schedule=zbh1", "tied"),
    ("pp=2,dp=2 zero=3 micro=2 schedule=zbv", ""),
    ("pp=2,tp=2 sp micro=2 schedule=interleaved", ""),
    ("pp=2,cp=2 micro=2 context=ring", ""),
)


@pytest.mark.parametrize(("line", "config"), TWO)
def test_stages_communicate_and_hold_what_is_planned(line: str, config: str) -> None:
    """Bytes of collectives and messages equal; parameters, gradients and optimizer within 1 %, what is kept within 5 %."""
    compare(line, config)


@pytest.mark.slow
@pytest.mark.parametrize(("line", "config"), MORE)
def test_more_stages_communicate_and_hold_what_is_planned(line: str, config: str) -> None:
    compare(line, config)


def test_a_stage_of_several_ranks() -> None:
    compare("pp=2,dp=2 zero=2 micro=2", "")
