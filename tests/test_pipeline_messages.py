"""What a running pipeline sends: torch's own calls are the table's sends and receives, and nothing else is exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import fmegatron as fm
from fmegatron.parallel.schedules import RECV_B, RECV_F, SEND_B, SEND_F, Schedule
from tests.processes import processes
from tests.test_pipeline_steps import batch, decoder, parts

ROWS, SEQ, MICROBATCHES = 5, 6, 3
SIZES = (2, 2, 1)  # rows of a microbatch: as even as they go
SENT = {SEND_F: "isend", SEND_B: "isend", RECV_F: "irecv", RECV_B: "irecv"}


class Collectives(TorchDispatchMode):
    """Appends the names of all operations between ranks to `log`, in order, as torch dispatches them."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func._schema.name.split("::")
        if space == "c10d":
            self.log.append(name)
        return func(*args, **(kwargs or {}))


def recorded(schedule: str) -> tuple[list[list[Any]], list[list[str]], Schedule]:
    """On one rank, of three steps: the (call, peer, shape) of every op of every `batch_isend_irecv`, and all operations
    between ranks; and the table. The third step has a batch of another length."""
    model = decoder()
    pipe, sh = parts(model, schedule, MICROBATCHES)
    params = fm.init(pipe.spec, fm.key(0), sh=sh)
    plain, calls = dist.batch_isend_irecv, list[Any]()

    def noted(ops: list[dist.P2POp]) -> Any:
        calls.append([(op.op.__name__, op.group_peer, tuple(op.tensor.shape)) for op in ops])
        return plain(ops)

    batches, others = [], []
    dist.batch_isend_irecv = noted
    try:
        for length in (SEQ, SEQ, SEQ + 1):
            calls = []
            with Collectives() as seen:
                pipe(params, batch(length, ROWS), fm.Ctx(sh=sh))
            batches.append(calls)
            others.append(seen.log)
    finally:
        dist.batch_isend_irecv = plain
    return batches, others, pipe.table


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv", "dualpipev"])
def test_what_is_sent_is_the_table(schedule: str) -> None:
    """Call by call: who, with whom, which shape, in which batch. A second step makes the same calls and, apart from the
    loss that the last stage tells all, nothing more: no shapes are exchanged. Those of a batch of another length are
    known on both sides too."""
    embed = decoder().config.embed
    for rank, (batches, others, table) in enumerate(processes(2).run(recorded, schedule)):
        for calls, length in zip(batches, (SEQ, SEQ, SEQ + 1), strict=True):
            want: list[Any] = []
            for a in table.programs[rank]:
                if a.kind not in SENT:
                    continue
                if not a.joined:
                    want.append([])
                to = a.stage + (1 if a.kind in (SEND_F, RECV_B) else -1)
                want[-1].append((SENT[a.kind], table.placement[to], (SIZES[a.microbatch], length, embed)))
            assert calls == want
        kinds = [{"isend": "send", "irecv": "recv_"}[call] for ops in batches[1] for call, *_ in ops]
        assert others[1] == [*kinds, "broadcast_"]
        assert [name for name in others[2] if name != "broadcast_"] == kinds
        assert {name for name in others[0]} <= {"send", "recv_", "broadcast_"}
