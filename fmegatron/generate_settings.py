"""The settings of `fmegatron generate`, with the processes that it may run on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fmegatron import config
from fmegatron.axes import parse_axes
from fmegatron.errors import UserError

PIPELINE = "pp"


@dataclass(frozen=True)
class GenerateConfig(config.GenerateConfig):
    """Continue prompts with a trained model."""

    mesh: str | None = None
    """pp=2: the layers over 2 processes of this machine, each of which reads its own; torchrun starts those of several
    machines. None: one process."""
    stages: str | None = None
    """With --mesh pp=N, which layers lie on which process, in Megatron-LM's notation: Et|ttt|tL. None: as even as can be."""

    def ranks(self) -> int:
        """The number of processes. Raises UserError for a mesh of other axes."""
        if self.mesh is None:
            if self.stages is not None:
                raise UserError(f"--stages {self.stages} is for several processes: add --mesh pp=N, or leave it out")
            return 1
        axes = parse_axes(self.mesh, argument="--mesh")
        if any(n > 1 for name, n in axes.items() if name != PIPELINE):
            raise UserError(
                f"--mesh {self.mesh}: generation runs over pp alone: give --mesh {PIPELINE}={math.prod(axes.values())}"
            )
        return axes.get(PIPELINE, 1)
