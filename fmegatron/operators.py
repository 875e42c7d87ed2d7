"""Operations of our own as operators of torch: compiled code, simulation and tracing see one each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("fmegatron", "FRAGMENT")  # while it lives, so do its operators
NO_GRADIENT = "has no gradient: call it within an autograd function"


def custom_operator(name: str, *, overwrites: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function of tensors, which neither returns one of its arguments nor changes one but those that it
    `overwrites`, an operator of torch:

        @custom_operator("fmegatron::norm")
        def _norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]: …

        @_norm.register_fake
        def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]: …  # new tensors of the results' shapes and dtypes

    The result is called like the function, and is `torch.ops.fmegatron.norm`. It has no gradient: call it within an
    autograd function. torch.library.custom_op is the same with more checks, but takes 2 ms to make one (it looks for the
    source of its caller), and an import makes thirty.
    """
    namespace, own = name.split("::")
    if namespace != _LIBRARY.ns:
        raise ValueError(f"custom_operator({name!r}): its name must begin with '{_LIBRARY.ns}::'")

    def made(body: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(body, mutates_args=overwrites)
        _LIBRARY.define(own + schema, tags=(torch.Tag.pt2_compliant_tag,))
        packet = getattr(torch.ops.fmegatron, own)

        def with_graph(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                found = packet(*args)
            if not (
                torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in _flat(args))
            ):
                return found
            if overwrites:
                raise RuntimeError(f"{name} {NO_GRADIENT}")
            several = isinstance(found, tuple | list)
            needs = torch.zeros((), requires_grad=True)
            marked = _WithoutGradient.apply(name, needs, *(found if several else [found]))
            return type(found)(marked) if several else marked[0]

        _LIBRARY.impl(own, body, "CompositeExplicitAutograd")  # on every device
        _LIBRARY.impl(own, with_graph, "Autograd")

        def call(*args: Any) -> Any:
            return packet(*args)

        def register_fake(fake: Callable[..., Any]) -> Callable[..., Any]:
            _LIBRARY.impl(own, fake, "Meta")
            return fake

        call.register_fake = register_fake  # type: ignore[attr-defined]
        return call

    return made


def _flat(args: Any) -> Iterator[Any]:
    """The arguments, and what is in lists among them."""
    for a in args:
        yield from a if isinstance(a, list | tuple) else (a,)


class _WithoutGradient(torch.autograd.Function):
    """Results of an operator. Who asks for their gradient is told that there is none; torch itself would only warn."""

    @staticmethod
    def forward(name: str, needs: torch.Tensor, *results: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in results)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(f"{ctx.name} {NO_GRADIENT}")
