"""Many leaves through their arrows at once: one collective for all that go over the same axes in the same dtype.

A layer's parameters are gathered, and its gradients reduced, as one flat tensor (FSDP's and DDP's buckets). `start`
issues the collectives and returns at once; `Moving.finish` waits and cuts the results apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fmegatron import collectives
from fmegatron.collectives import COST, NarrowSum, Step, packed, run_step, unpacked, wire_of
from fmegatron.mesh import Mesh
from fmegatron.simulation import lift


def start(mesh: Mesh, xs: Sequence[torch.Tensor], plans: Sequence[tuple[Step, ...]]) -> Moving:
    """Begin to take every local tensor through the steps of its plan, without a gradient."""
    return Moving(mesh, xs, plans)


def move(mesh: Mesh, xs: Sequence[torch.Tensor], plans: Sequence[tuple[Step, ...]]) -> list[torch.Tensor]:
    """Every local tensor behind the steps of its plan."""
    return start(mesh, xs, plans).finish()


class Moving:
    """Tensors on their way. Where a leaf has several collectives in turn, the first runs beside other work and the
    others when it is waited for."""

    def __init__(self, mesh: Mesh, xs: Sequence[torch.Tensor], plans: Sequence[tuple[Step, ...]]) -> None:
        self.mesh = mesh
        self.values: list[Any] = [lift(x, mesh.world) for x in xs] if mesh.simulated else list(xs)
        self.kinds = [(x.dtype, x.device) for x in self.values]
        self.plans = [list(plan) for plan in plans]
        self.pending: list[tuple[list[int], list[torch.Size], torch.Tensor | NarrowSum]] = []
        self._issue()

    def finish(self) -> list[torch.Tensor]:
        """The values, when all of them have arrived."""
        while self.pending:
            arrived, self.pending = self.pending, []
            for members, shapes, flat in arrived:
                self._take(members, shapes, flat.finish() if isinstance(flat, NarrowSum) else collectives.end(flat))
            self._issue()
        return self.values

    def advance(self) -> bool:
        """Begins the second half of sums whose first half is under way (`NarrowSum`): were there any?"""
        return any([sum_.advance() for *_, sum_ in self.pending if isinstance(sum_, NarrowSum)])

    def _issue(self) -> None:
        """Take all steps that need no other rank, and issue the collectives of all steps that are next."""
        for i, plan in enumerate(self.plans):
            while plan and COST[plan[0].kind] in ("nothing", "slice"):
                step = plan.pop(0)
                self.values[i] = self.values[i] if step.kind == "I>R" else run_step(self.values[i], self.mesh, step)
        groups: dict[Any, list[int]] = {}
        for i, plan in enumerate(self.plans):
            if plan:
                groups.setdefault(self._key(i, plan[0]), []).append(i)
        # a collective waits for leaves that come to it later, so that they share it
        later = {self._key(i, step) for i, plan in enumerate(self.plans) for step in plan[1:]}
        ready = [key for key in groups if key not in later] or list(groups)[:1]
        for key in ready:
            collective, axes, dtype, _, wire = key
            parts = [packed(self.values[i], self.mesh, self.plans[i][0]).to(dtype) for i in groups[key]]
            shapes = [part.shape for part in parts]
            for i in groups[key]:
                self.values[i] = None
            flat = _joined(collective, parts)
            del parts  # what is under way is one tensor
            started: torch.Tensor | NarrowSum
            if wire is None:
                started = collectives.begin(collective, flat, self.mesh, axes)
            else:
                started = NarrowSum(collective, flat, self.mesh, axes, wire)
            self.pending.append((groups[key], shapes, started))

    def _key(self, i: int, step: Step) -> tuple[Any, ...]:
        """What leaves share that go in one collective."""
        wire = wire_of(step)
        dtype, device = self.kinds[i]
        return COST[step.kind], step.axes, dtype if wire is None else wire.sent, device, wire

    def _take(self, members: list[int], shapes: list[torch.Size], flat: torch.Tensor) -> None:
        """The parts of a flat result as the values behind their steps."""
        flat = flat.view(flat.shape[0], -1) if len(members) > 1 else flat
        steps = [self.plans[i].pop(0) for i in members]
        for i in members:
            self.kinds[i] = (flat.dtype, flat.device)  # a sum may be in a wider dtype than its summands
        if len(members) == 1:
            self.values[members[0]] = unpacked(flat, self.mesh, steps[0])
            return
        whole = COST[steps[0].kind] == "all-reduce"
        sizes = [shape.numel() if whole else shape[1:].numel() for shape in shapes]
        parts = flat.view(-1).split(sizes) if whole else flat.split(sizes, 1)
        for i, step, shape, part in zip(members, steps, shapes, parts, strict=True):
            part = part.view(shape if whole else (flat.shape[0], *shape[1:]))
            # a gathered parameter is a tensor of its own, so that the bucket can be freed
            self.values[i] = unpacked(part, self.mesh, step).contiguous()


def _joined(collective: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Packed values as one: flat to be added up, else flat behind their first dim, that of the ranks."""
    if len(parts) == 1:
        return parts[0]
    if collective == "all-reduce":
        return torch.cat([part.reshape(-1) for part in parts])
    return torch.cat([part.flatten(1) if part.dim() > 1 else part[:, None] for part in parts], 1)
