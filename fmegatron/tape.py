"""The tape: how a transform sees the primitives that a block calls.

Two things pass through it. A *tap* lets a backward stop at a product's output gradient, so that the product of input
and output gradient, which gives the weight's gradient, can be done later. And the outputs of a computation that is
*saved by name* are kept in a block's first run and handed to it in the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from fmegatron.errors import UserError
from fmegatron.function import apply_function

UNSEEN = "which the backward would not see: use the out-of-place operation"


class Root(Function):
    """(root, value) -> value; the gradient goes to both.

    An output of a product gets such a root, its tap, and so does every input of a block, which must be cut off what
    came before: a graph keeps its leaves alive, so a gathered parameter must not be one; a root has no storage.
    """

    @staticmethod
    def forward(root: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return g, g


def make_root(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A leaf of this shape that holds a single element."""
    return like.new_zeros((), dtype=dtype).expand(tuple(shape)).requires_grad_()


@dataclass(frozen=True)
class Call:
    """One call of a primitive.

    leaf: which leaf of the parameters was its weight, or None; shape, dtype: of its first output;
    weight_gradient(*inputs, output_gradient) -> the gradient of the weight.
    """

    leaf: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    weight_gradient: Callable | None


class Tape:
    """What goes into and comes out of the primitives of one run of a block, in the order of their calls.

    save: policy, a function of a computation's name: are its outputs kept for the second run?
    weights: the block's parameter leaves (or None in the place of a leaf that must not be tapped): products by one
        of them are cut off it and tapped at the call.
    taps: instead of `weights`, when the calls are known: the root of each call, or None. (In compiled blocks: a
        root made inside the graph could not leave it.)
    saved: in a second run, the kept outputs of the first.

    A primitive that wants to be tapped or saved asks the tape twice::

        weight, saved = tape.enter(name, weight)
        outs = compute(…) if saved is None else outs_from(saved)       # and the same graph for the backward
        outs = tape.leave(name, outs, inputs, weight_gradient)
    """

    def __init__(
        self,
        save: Callable[[str], bool],
        weights: Sequence[Any] = (),
        taps: list[torch.Tensor | None] | None = None,
        saved: list[list[torch.Tensor]] | None = None,
    ) -> None:
        self.save, self.weights, self.saved = save, weights, saved
        self.taps: list[torch.Tensor | None] = [] if taps is None else taps
        self.call, self.read = 0, 0  # calls so far; entries of `saved` read so far
        self.calls: list[Call] = []
        self.inputs: list[list[torch.Tensor]] = []  # of the tapped products
        self.kept: list[list[torch.Tensor]] = []  # for the second run
        self.versions: list[tuple[str, torch.Tensor, int]] = []
        self.leaf: int | None = None
        self.tap: torch.Tensor | None = None

    def wants(self, *names: str) -> bool:
        """May one of these computations be tapped or kept?"""
        return bool(self.weights or self.taps) or any(self.save(name) for name in names)

    def enter(self, name: str, w: torch.Tensor | None = None) -> tuple[Any, list[torch.Tensor] | None]:
        """Opens a call of the primitive `name` with the weight w: (weight to use, outputs kept in the first run or
        None)."""
        self.leaf, self.tap = None, None
        if self.taps and not self.weights:
            self.tap = self.taps[self.call] if self.call < len(self.taps) else None
        elif w is not None and not torch.compiler.is_compiling():
            self.leaf = next((i for i, t in enumerate(self.weights) if t is w), None)
        replay = self.saved is not None and self.save(name) and self.read < len(self.saved)
        self.call += 1
        self.read += replay
        if w is not None and (self.leaf is not None or self.tap is not None):
            w = w.detach()
        return w, self.saved[self.read - 1] if replay and self.saved is not None else None

    def leave(
        self,
        name: str,
        outs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor] = (),
        weight_gradient: Callable | None = None,
    ) -> Sequence[torch.Tensor]:
        """Closes the call (calls do not nest): its outputs, the first of them tapped if the weight is to be.

        inputs: what `weight_gradient(*inputs, gradient of the first output)` needs.
        """
        if self.saved is None and self.save(name):
            self.kept.append([self.watch(name, o) for o in outs])
        if self.weights:
            self.calls.append(Call(self.leaf, tuple(outs[0].shape), outs[0].dtype, weight_gradient))
        if self.leaf is not None:
            self.tap = make_root(outs[0], outs[0].shape, outs[0].dtype)
            self.taps.append(self.tap)
        if self.tap is None:
            return outs
        self.inputs.append([self.watch(name, t) for t in inputs])
        return [apply_function(Root, self.tap, outs[0]), *outs[1:]]

    def watch(self, name: str, t: torch.Tensor) -> torch.Tensor:
        """t without its graph, to be kept past the run; `check` finds it if it is changed in place."""
        if not torch.compiler.is_compiling():
            self.versions.append((name, t, t._version))
        return t.detach()

    def check(self) -> None:
        """Raises when the run did not call what it was expected to, or changed a kept tensor in place."""
        by_order = bool(self.taps) and not self.weights
        if (by_order and self.call != len(self.taps)) or (self.saved is not None and self.read != len(self.saved)):
            raise UserError(
                "a block called its primitives otherwise than before: it must not branch on grad mode, device or values"
            )
        changed = sorted({name for name, t, version in self.versions if t._version != version})
        if changed:
            raise UserError(f"an input or output of {', '.join(changed)} is changed in place after the call, {UNSEEN}")
        self.versions.clear()


class Unchanged:
    """Tensors that are kept for later, and how they were: `check` raises when one of them was changed in place
    since."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.seen = [(t, t._version) for t in tensors]

    def check(self) -> None:
        if any(t._version != version for t, version in self.seen):
            raise UserError(f"an input of a block or of a product is changed in place after the forward, {UNSEEN}")
