"""Operations of our own as operators of torch: compiled code, simulation and tracing see one each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("fmegatron", "FRAGMENT")  # while it lives, so do its operators


def custom_operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function of tensors, which neither changes nor returns one of its arguments, an operator of torch:

        @custom_operator("fmegatron::norm")
        def _norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]: …

        @_norm.register_fake
        def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]: …  # new tensors of the results' shapes and dtypes

    The result is called like the function, and is `torch.ops.fmegatron.norm`. It has no gradient: call it within an
    autograd function. torch.library.custom_op is the same with a gradient and more checks, but takes 3 ms to make one
    (it looks for the source of its caller), of which an import would make fifty.
    """
    namespace, own = name.split("::")
    if namespace != _LIBRARY.ns:
        raise ValueError(f"custom_operator({name!r}): its name must begin with '{_LIBRARY.ns}::'")

    def made(body: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(body, mutates_args=())
        _LIBRARY.define(own + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(own, body, "CompositeExplicitAutograd")  # on every device
        packet = getattr(torch.ops.fmegatron, own)

        def call(*args: Any) -> Any:
            return packet(*args)

        def register_fake(fake: Callable[..., Any]) -> Callable[..., Any]:
            _LIBRARY.impl(own, fake, "Meta")
            return fake

        call.register_fake = register_fake  # type: ignore[attr-defined]
        return call

    return made
