"""Rematerialisation: a block whose backward runs it again instead of keeping its activations.

What is kept is named by computation, not by value (as in Megatron's selective recompute): `names("attention")` keeps
attention's outputs, whose computation is then skipped in the second run. torch's own checkpoint is none of these: it
fails under torch.func and would keep gathered parameters alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from fmegatron.errors import UserError
from fmegatron.function import apply_function, under_torch_func
from fmegatron.split import Split, everything, split, uncompiled
from fmegatron.tree import is_float, is_tensor, leaves, like, tensors

__all__ = ["everything", "joined", "names", "nothing", "remat"]


def nothing(name: str) -> bool:
    """Policy: keep the block's input alone."""
    return False


def names(*some: str) -> Callable[[str], bool]:
    """Policy: keep the outputs of the computations with these names, e.g. "attention"."""
    return lambda name: name in some


def remat(f: Callable, save: Callable[[str], bool] = nothing) -> Callable:
    """f(params, x, ctx) whose backward runs it again, all but the computations whose name `save` accepts.

    save: `nothing`, `everything` (which makes remat do nothing but its checks), `names(…)` or any predicate on a name.
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

    return joined(split(inner, save), plain)


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
