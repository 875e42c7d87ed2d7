"""What fp8 products read and note besides their operands: the state of one step, an explicit part of `sh`.

`begin` makes it of a train state's extras, products fill it, and `end` gives the next extras. Nothing lives longer than
its step but the history of delayed scaling, which is a leaf of the extras: {"fp8": {"history", "steps"}}.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fmegatron import capturing, tree
from fmegatron.collectives import all_reduce
from fmegatron.errors import UserError
from fmegatron.fp8.cast import Operand, scale_of
from fmegatron.fp8.policy import FORMATS, Fp8
from fmegatron.simulation import lift
from fmegatron.spec import params_of

EXTRAS = "fp8"  # the key of the state in a train state's extras
X, W, G = range(3)  # the operands of a product: activation, weight, output gradient


@dataclass(frozen=True, eq=False)
class Layer:
    """What the products of one layer read and note.

    wide: they stay in the compute dtype. names: of the products in the rows of scales and seen. scales: float32[name, operand],
    by what operands are multiplied ("delayed"); None: by their own largest magnitude. seen: float32[name, operand], the largest
    magnitudes of this step so far, in place. casts: of parameters, as far as they are kept over microbatches.
    """

    wide: bool = False
    names: tuple[str, ...] = ()
    scales: Tensor | None = None
    seen: Tensor | None = None
    casts: Casts | None = None

    def row(self, name: str) -> int | None:
        """Where a product's numbers are; None for one that scaling does not look back for."""
        return self.names.index(name) if self.seen is not None and name in self.names else None


@dataclass(frozen=True, eq=False)
class Step:
    """The state of fp8 in one step: a `Layer` for each layer, and casts (see there). first: has nothing been seen before?"""

    layers: Mapping[int, Layer] = field(default_factory=dict)
    casts: Casts | None = None


class Casts:
    """Casts of parameters that are kept from the first microbatch to the last.

    Kept are those of tensors that lie in the memory of the parameters at rest (`params`): their casts cost as much memory as
    they do in bfloat16. What is gathered for a while is cast anew each time, as keeping it would keep it gathered.
    """

    def __init__(self, params: Any) -> None:
        local = [t.to_local() if hasattr(t, "to_local") else t for t in tree.leaves(params) if tree.is_float(t)]
        self.kept = {t.untyped_storage()._cdata for t in local if type(t) is Tensor}
        self.params = local  # so that no other tensor gets their memory
        self.found: dict[Any, tuple[Operand, Operand]] = {}

    def key(self, w: Tensor) -> Any:
        """What a parameter's cast is found by; None for what is not kept."""
        if type(w) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
            return None
        place = w.untyped_storage()._cdata
        return (place, w.storage_offset(), w.shape, w.stride(), w._version) if place in self.kept else None


def site_names(spec: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """(layers, names of their matrices) of a spec tree: of what delayed scaling keeps a history."""
    layers, names = set(), set()
    for path, param in params_of(spec).items():
        parts = path.split(".")
        if len(param.shape) > 1 and len(parts) > 1 and parts[-2].isdigit():
            layers.add(int(parts[-2]))
            names.add(parts[-1])
    return tuple(sorted(layers)), tuple(sorted(names))


def init(fp8: Fp8 | None, spec: Any, *, device: Any = "cpu") -> Any:
    """The first extras of a train state: {"fp8": …} for delayed scaling, else None.

    history: float32[step, layer, name, operand], the largest magnitudes of the last steps, newest first, over all ranks; steps: how
    many there were. A product finds its row by its layer and its name, which should be that of its weight's leaf; products
    outside `stack`, or of other names, scale by what they have at hand, as "tensorwise".
    """
    if fp8 is None or fp8.recipe != "delayed":
        return None
    layers, names = site_names(spec)
    history = torch.zeros((fp8.history, len(layers), len(names), 3), dtype=torch.float32, device=device)
    return {EXTRAS: {"history": history, "steps": 0}}


def abstract(saved: Mapping[str, tuple[tuple[int, ...], str]]) -> Any:
    """The extras that a checkpoint of `fmegatron train` holds, as meta tensors, by what tensors it has; None for none."""
    name = f"extras.{EXTRAS}.history"
    if name not in saved:
        return None
    return {EXTRAS: {"history": torch.empty(saved[name][0], dtype=torch.float32, device="meta"), "steps": 0}}


def resumed(saved: Any, first: Any) -> Any:
    """The extras with which a run goes on: those that were saved, or where it has no history of this shape, the first."""
    if saved is None or first is None or saved[EXTRAS]["history"].shape != first[EXTRAS]["history"].shape:
        return first
    return saved


def begin(sh: Any, extras: Any, *, spec: Any = None, params: Any = None) -> Any:
    """`sh` with the fp8 state of one step; `sh` itself where there is none.

    extras: of the train state. params: at rest; given where they are cast once for several microbatches.
    """
    fp8 = sh.precision.fp8
    if fp8 is None:
        return sh
    casts = None if params is None else Casts(params)
    state = extras.get(EXTRAS) if isinstance(extras, Mapping) else None
    if fp8.recipe != "delayed" or state is None or spec is None:
        return sh if casts is None else dataclasses.replace(sh, fp8=Step(casts=casts))
    indices, names = site_names(spec)
    history = state["history"]
    scales = scales_of(history, fp8) if _seen_any(state["steps"]) else None
    simulated = sh.mesh is not None and sh.mesh.simulated
    layers = {}
    for i, index in enumerate(indices):
        seen = torch.zeros_like(history[0, i])
        seen = lift(seen, sh.mesh.world) if simulated else seen
        layers[index] = Layer(False, names, None if scales is None else scales[i], seen, casts)
    return dataclasses.replace(sh, fp8=Step(layers, casts))


def _seen_any(steps: Any) -> bool:
    """Has a step noted magnitudes? A recorded step has, as there were steps before it; a play of it that begins a run anew
    raises UserError."""
    if capturing.recording() is None or not isinstance(steps, Tensor):
        return bool(steps)
    capturing.numbers(_noted, steps)
    return True


def _noted(steps: int) -> tuple[float]:
    if not steps:
        raise UserError(
            "recorded: delayed fp8 scaling was recorded with a history, and this state has none (0 steps): make another "
            "recording for it"
        )
    return (float(steps),)


def without(extras: Any) -> Any:
    """The extras that a model sees: those of its own."""
    if not isinstance(extras, Mapping) or EXTRAS not in extras:
        return extras
    return {name: value for name, value in extras.items() if name != EXTRAS} or None


def drop_casts(sh: Any) -> None:
    """Frees what was kept over the microbatches of a step."""
    if isinstance(sh.fp8, Step) and sh.fp8.casts is not None:
        sh.fp8.casts.found.clear()


def end(sh: Any, extras: Any) -> Any:
    """The next extras, after a step whose gradients were made with `sh`: what it has seen is the newest row of the history."""
    if not isinstance(sh.fp8, Step) or not sh.fp8.layers:
        return extras
    state = extras[EXTRAS]
    seen = torch.stack([layer.seen for layer in sh.fp8.layers.values() if layer.seen is not None])
    if sh.mesh is not None:
        seen = all_reduce(seen, sh.mesh, sh.mesh.order, "max")
    seen = seen.where(seen.isfinite(), 0.0)
    history = torch.cat([seen[None], state["history"][:-1]])
    return {**extras, EXTRAS: {"history": history, "steps": state["steps"] + 1}}


def scales_of(history: Tensor, fp8: Fp8) -> Tensor:
    """By what operands are multiplied after such a history; 1 for those that were zero in all of it."""
    largest = history.amax(0)
    forward, backward = (scale_of(largest, dtype, fp8.margin) for dtype in (FORMATS["e4m3"], fp8.gradient_dtype))
    gradient = torch.arange(3, device=largest.device) == G
    return torch.where(largest > 0, torch.where(gradient, backward, forward), 1.0)


def at_layer(sh: Any, index: int, layers: int | None) -> Any:
    """`sh` for the products of one of so many layers: what `stack` gives a block. Blocks find no index in it, so that one
    compiled graph serves all layers alike. Raises UserError for Fp8(keep_last=…) where the number of layers is not known."""
    fp8 = sh.precision.fp8
    if fp8 is None:
        return sh
    step = sh.fp8 if isinstance(sh.fp8, Step) else Step()
    if layers is None and fp8.keep_last:
        raise UserError(f"Fp8(keep_last={fp8.keep_last}) needs the number of layers: give stack(…) its spec")
    wide = fp8.keeps_layer(index, layers or index + 1)
    layer = step.layers.get(index, Layer(casts=step.casts))
    layer = dataclasses.replace(layer, wide=True) if wide else layer
    other = object.__new__(type(sh))  # as `with_tape`
    other.__dict__.update(sh.__dict__, fp8=layer)
    return other
