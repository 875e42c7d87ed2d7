"""Rematerialisation: a block whose backward runs it again instead of keeping its activations.

What is kept is named by computation, not by value (as in Megatron's selective recompute): `names("attention")` keeps
attention's outputs, whose computation is then skipped in the second run; `offload("attention")` keeps them in host
memory. torch's own checkpoint is none of these: it fails under torch.func and would keep gathered parameters alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from fmegatron.errors import UserError
from fmegatron.function import apply_function, under_torch_func
from fmegatron.split import Again, Split, abstract_calls, everything, split, uncompiled
from fmegatron.tape import Unchanged
from fmegatron.tree import is_float, is_tensor, leaves, like, structure, tensors

__all__ = ["Offload", "everything", "joined", "names", "nothing", "offload", "remat"]


def nothing(name: str) -> bool:
    """Policy: keep the block's input alone."""
    return False


def names(*some: str) -> Callable[[str], bool]:
    """Policy: keep the outputs of the computations with these names, e.g. "attention"."""
    return lambda name: name in some


@dataclass(frozen=True)
class Offload:
    """A policy; made by `offload`."""

    host: frozenset[str]
    device: frozenset[str]

    def __call__(self, name: str) -> bool:
        return name in self.host or name in self.device


def offload(*host: str, keep: Iterable[str] = ()) -> Offload:
    """Policy: keep the outputs of the computations with these names in (pinned) host memory, e.g. offload("attention",
    "gate", "up"), and those named in `keep` on the device.

    On a GPU they go beside what runs after them, and come back while the block behind this one has its backward: with
    names whose computation takes longer than their copy, it costs no time. On a CPU they are copied.
    """
    return Offload(frozenset(host), frozenset(keep) - frozenset(host))


def remat(f: Callable, save: Callable[[str], bool] = nothing) -> Callable:
    """f(params, x, ctx) whose backward runs it again, all but the computations whose name `save` accepts.

    save: `nothing`, `everything` (which makes remat do nothing but its checks), `names(…)`, `offload(…)` or any predicate
        on a name.
    Under torch.func all is run again, whatever `save`: the values are the same. The second run happens with the same
    ctx; the carry and ctx must not be changed in place. Raises UserError when f reads a tensor that needs a gradient
    without getting it as an argument, and RuntimeError at a second backward through one call.
    """
    inner = (
        f if not hasattr(f, "split") else lambda p, x, ctx: f(p, x, ctx)
    )  # whose own split would run past the policy

    def plain(p: Any, x: Any, ctx: Any) -> Any:
        if not under_torch_func():
            return f(p, x, ctx)
        flat, build = tensors((p, x, ctx.with_tape(None)))

        def forward(flat: list[torch.Tensor]) -> list[torch.Tensor]:
            with _Refuse():
                outs, box.build = tensors(uncompiled(f)(*build(flat)))
            return outs

        # No backward of its own: such a node may run after the transform has ended, and then too must run f by vjp.
        box = _Box(forward, again=forward)
        outs = apply_function(_Node, box, *flat)
        return box.build(outs)

    if isinstance(save, Offload) and save.host:
        return joined(_through_host(inner, save), plain)
    return joined(split(inner, save), plain)


def _through_host(f: Callable, policy: Offload) -> Split:
    """The split of f whose residuals hold what `policy` names in host memory."""
    compiled = uncompiled(f) is not f
    seen = _Seen(policy)
    s = split(f, policy if compiled else seen)
    known: dict[Any, list[str]] = {}
    parked: list[weakref.ref[_Parked]] = []  # in the order of the forward

    def order(p: Any, x: Any, ctx: Any) -> list[str]:
        """The names of what is kept, in order, of a block that is compiled: by a run without data."""
        shapes = structure((p, x)), *((t.shape, t.dtype) if is_tensor(t) else t for t in leaves((p, x)))
        if shapes not in known:
            found = _Seen(policy)
            abstract_calls(uncompiled(f), p, x, ctx, found)
            known[shapes] = found.names
        return known[shapes]

    def forward(p: Any, x: Any, ctx: Any, joint: bool = False, trainable: Any = None) -> tuple[Any, _Parked]:
        seen.names = []
        y, residual = s.forward(p, x, ctx, joint, trainable)
        box = _Parked(residual, order(p, x, ctx) if compiled else seen.names, policy)
        parked[:] = [r for r in parked if r() is not None]
        parked.append(weakref.ref(box))
        return y, box

    def restored(box: _Parked) -> Again:
        residual = box.restored()
        waiting = [r() for r in parked]
        before = [b for b in waiting[: waiting.index(box)] if b is not None and not b.begun] if box in waiting else []
        if before:
            before[-1].begin()  # comes while this block has its backward
        return residual

    def backward(box: _Parked, gy: Any, params: Any) -> tuple[Any, Any]:
        return s.backward(restored(box), gy, params)

    def backward_input(box: _Parked, gy: Any, params: Any) -> tuple[Any, Any]:
        return s.backward_input(restored(box), gy, params)

    return Split(forward, backward, backward_input, s.backward_weight)


class _Seen(threading.local):
    """A policy that notes what it accepts, for each thread by itself: another one may be in the middle of its forward."""

    def __init__(self, policy: Offload) -> None:
        self.policy, self.names = policy, list[str]()

    def __call__(self, name: str) -> bool:
        wanted = self.policy(name)
        if wanted:
            self.names.append(name)
        return wanted


class _Parked:
    """A residual of which some kept outputs are in host memory."""

    def __init__(self, residual: Again, names: list[str], policy: Offload) -> None:
        from fmegatron.offload import copies_of

        self.residual = residual
        self.rows = [i for i, name in enumerate(names) if name in policy.host]
        kept, residual.kept = residual.kept, list(residual.kept)
        away = {id(t) for i in self.rows for t in kept[i]}
        # a copy is on its way: what happens to the original from here on changes nothing, and it must not be held
        residual.unchanged = Unchanged(t for t, _ in residual.unchanged.seen if id(t) not in away)
        devices = [t.device for i in self.rows for t in kept[i]]
        self.copies = copies_of(devices[0]) if devices else None
        for i in self.rows:
            residual.kept[i] = [self.copies.to_host(t) for t in kept[i]]  # type: ignore[union-attr]
        self.begun = False

    def begin(self) -> None:
        """What is in host memory begins to come back."""
        if not self.begun and self.copies is not None:
            for i in self.rows:
                self.residual.kept[i] = [self.copies.to_device(t) for t in self.residual.kept[i]]
        self.begun = True

    def restored(self) -> Again:
        """The residual with all of it on the device."""
        self.begin()
        if self.copies is not None:
            self.copies.wait_arrived()
        return self.residual


def joined(s: Split, plain: Callable) -> Callable:
    """A function whose forward and backward are those of a split, the backward joint; `plain` computes the same under
    torch.func and where nothing needs a gradient. It carries the split as `.split`."""

    def f(p: Any, x: Any, ctx: Any) -> Any:
        flat, build = tensors((p, x))
        if under_torch_func() or not torch.is_grad_enabled() or not any(t.requires_grad for t in flat):
            return plain(p, x, ctx)
        trainable = like(p, [is_tensor(t) and t.requires_grad for t in leaves(p)])

        def forward(flat: list[torch.Tensor]) -> list[torch.Tensor]:
            p, x = build(flat)
            y, box.residual = s.forward(p, x, ctx, joint=True, trainable=trainable)
            outs, box.build = tensors(y)
            return outs

        def backward(flat: list[torch.Tensor], g: tuple) -> list[torch.Tensor | None]:
            if box.residual is None:
                raise RuntimeError("a second backward through one call of a stack or remat: run its forward again")
            residual, box.residual = box.residual, None
            p, x = build(flat)
            gx, gp = s.backward(residual, box.build(g), p)
            return [t for t, a in zip(leaves((gp, gx)), leaves((p, x)), strict=True) if is_tensor(a)]

        box = _Box(forward, again=lambda flat: tensors(plain(*build(flat), ctx))[0], backward=backward)
        outs = apply_function(_Node, box, *flat)
        return box.build(outs)

    f.split = s  # type: ignore[attr-defined]
    return f


class _Box:
    """What a node of `_Node` runs: `forward(flat) -> outputs`, `again` the same for a graph of the backward, and,
    where it has one, `backward(flat, gradients of the outputs) -> gradients of flat`.
    """

    def __init__(self, forward: Callable, again: Callable, backward: Callable | None = None) -> None:
        self.forward, self.again, self.backward = forward, again, backward
        self.residual: Any = None
        self.build: Callable = tuple  # puts outputs into their tree


class _Node(Function):
    """`box.forward(flat) -> outputs` as one node of a graph.

    Its backward is `box.backward`; when a graph of the backward itself is asked for, which torch.func always does, it
    is torch.func.vjp of `box.again`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(box: _Box, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(box.forward(list(flat)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, outs: tuple[torch.Tensor, ...]) -> None:
        ctx.box = inputs[0]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o in outs if not is_float(o)))
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *g: torch.Tensor | None) -> tuple:
        box, flat = ctx.box, ctx.saved_tensors
        if box.backward is not None and not torch.is_grad_enabled():
            return None, *box.backward(flat, g)

        def outputs(*some: torch.Tensor) -> list[torch.Tensor]:
            values = iter(some)
            outs = box.again([next(values) if is_float(t) else t for t in flat])
            return [o for o, c in zip(outs, g, strict=True) if c is not None]

        pull = torch.func.vjp(outputs, *(t for t in flat if is_float(t)))[1]
        got = iter(pull([c for c in g if c is not None]))
        return None, *(next(got) if is_float(t) else None for t in flat)


class _Refuse(TorchFunctionMode):
    """Refuses closed-over tensors that a torch.func transform tracks: in a Function's forward torch silently takes them
    for constants. Tensors of the function itself are at the current level or below."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        current = torch._C._functorch.maybe_current_level() or 0
        if any((torch._C._functorch.maybe_get_level(t) or 0) > current for t in tensors((args, kwargs))[0]):
            raise UserError(
                "a closed-over tensor is differentiated or mapped by a torch.func transform: make it an argument of the block"
            )
        return func(*args, **(kwargs or {}))
