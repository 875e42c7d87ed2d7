"""Which Hugging Face tensor holds which parameter, and how it lays out our dims."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fmegatron.models.config import DecoderConfig
from fmegatron.spec import Param, params_of


@dataclass(frozen=True)
class HFTensor:
    """A Hugging Face tensor, or a part of one.

    name: the tensor's. dims: how it lays out our dims, "(kv group head) embed" (brackets: one of its dims).
    dim, start, whole: for a part (queries in a fused qkv matrix): it is cut along dim `dim` of the tensor, begins at
        `start`, and the tensor has `whole` there.
    other: another name that files may have it by.
    """

    name: str
    dims: str
    dim: int = 0
    start: int = 0
    whole: int | None = None
    other: str | None = None

    def inside(self, prefix: str) -> HFTensor:
        """The same in a module."""
        other = None if self.other is None else f"{prefix}.{self.other}"
        return replace(self, name=f"{prefix}.{self.name}", other=other)

    @property
    def groups(self) -> list[list[str]]:
        """Per dim of the Hugging Face tensor, our dims in it."""
        return [(inside or single).split() for inside, single in re.findall(r"\(([^)]*)\)|(\S+)", self.dims)]

    def part_shape(self, param: Param) -> tuple[int, ...]:
        """The shape of the part that holds a parameter of ours."""
        size = dict(zip(param.names, param.shape, strict=True))
        return tuple(math.prod(size[n] for n in group) for group in self.groups)

    def shape(self, param: Param) -> tuple[int, ...]:
        """The whole Hugging Face tensor's shape."""
        part = self.part_shape(param)
        return part if self.whole is None else (*part[: self.dim], self.whole, *part[self.dim + 1 :])


@dataclass(frozen=True)
class HFStack:
    """Hugging Face tensors that together hold one parameter: each is its part at one index of some dims (an expert's matrix).

    name: the tensors', with {dim} for each of these dims: "mlp.experts.{expert}.{gated}.weight". dims: how one tensor lays
    out the others. slices: {dim: what stands in the name for each index}.
    joined: the one tensor that files may have in place of them all.
    """

    name: str
    dims: str
    slices: Mapping[str, Sequence[Any]]
    joined: HFTensor | None = None

    def inside(self, prefix: str) -> HFStack:
        """The same in a module."""
        joined = None if self.joined is None else self.joined.inside(prefix)
        return replace(self, name=f"{prefix}.{self.name}", joined=joined)

    def apart(self, path: str, param: Param) -> dict[tuple[int, ...], tuple[str, Param, HFTensor]]:
        """{indices: (a path for the part, the part as a parameter, its tensor)}."""
        kept = [(n, size) for n, size in zip(param.names, param.shape, strict=True) if n not in self.slices]
        part = replace(param, dims=" ".join(n for n, _ in kept), shape=tuple(size for _, size in kept))
        found = {}
        for at in itertools.product(*(range(len(values)) for values in self.slices.values())):
            words = {n: values[i] for (n, values), i in zip(self.slices.items(), at, strict=True)}
            found[at] = (f"{path}[{','.join(map(str, at))}]", part, HFTensor(self.name.format(**words), self.dims))
        return found


def names_of(spec: Any, *, top: Mapping[str, Any], layer: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """{our dotted name: Hugging Face tensor, or stack of tensors} of every parameter of a spec.

    top: of the parameters outside the layers. layer: of those of one layer, whose tensors are called prefix.index.name.
    Raises KeyError for a parameter that neither names: the family has none like it.
    """
    found = {}
    for path in params_of(spec):
        if path.startswith(("layers.", "mtp.")):  # prediction modules have the indices behind the layers'
            _, index, leaf = path.split(".")
            found[path] = layer[leaf].inside(f"{prefix}.{index}")
        else:
            found[path] = top[path]
    return found


def fused(name: str, parts: Mapping[str, tuple[str, int]], *, dim: int = 0) -> dict[str, HFTensor]:
    """{our leaf: its part} of one tensor that holds several parameters behind each other along `dim`.

    parts: {our leaf: (its dims, its size along `dim`)}, in order.
    """
    whole = sum(size for _, size in parts.values())
    found, start = {}, 0
    for leaf, (dims, size) in parts.items():
        found[leaf] = HFTensor(name, dims, dim, start, whole)
        start += size
    return found


# The names that most families share.

TOP = {
    "embed": HFTensor("model.embed_tokens.weight", "vocab embed"),
    "norm": HFTensor("model.norm.weight", "embed"),
    "head": HFTensor("lm_head.weight", "vocab embed"),
}
PREFIX = "model.layers"
QKVO = {
    "q": HFTensor("self_attn.q_proj.weight", "(kv group head) embed"),
    "k": HFTensor("self_attn.k_proj.weight", "(kv head) embed"),
    "v": HFTensor("self_attn.v_proj.weight", "(kv head) embed"),
    "q_bias": HFTensor("self_attn.q_proj.bias", "(kv group head)"),
    "k_bias": HFTensor("self_attn.k_proj.bias", "(kv head)"),
    "v_bias": HFTensor("self_attn.v_proj.bias", "(kv head)"),
    "o": HFTensor("self_attn.o_proj.weight", "embed (kv group head)"),
    "o_bias": HFTensor("self_attn.o_proj.bias", "embed"),
}
MLP = {
    "gate": HFTensor("mlp.gate_proj.weight", "mlp embed"),
    "up": HFTensor("mlp.up_proj.weight", "mlp embed"),
    "down": HFTensor("mlp.down_proj.weight", "embed mlp"),
    "gate_bias": HFTensor("mlp.gate_proj.bias", "mlp"),
    "up_bias": HFTensor("mlp.up_proj.bias", "mlp"),
    "down_bias": HFTensor("mlp.down_proj.bias", "embed"),
}
PRE_NORMS = {
    "norm1": HFTensor("input_layernorm.weight", "embed"),
    "norm2": HFTensor("post_attention_layernorm.weight", "embed"),
}
HEAD_NORMS = {
    "q_norm": HFTensor("self_attn.q_norm.weight", "head"),
    "k_norm": HFTensor("self_attn.k_norm.weight", "head"),
}


def expert_names(
    config: DecoderConfig, block: str, *, matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, HFTensor | HFStack]:
    """The names of a router and its experts, each of which has matrices of its own: block.experts.index.matrix.weight.

    Version 5 of transformers computes with one tensor of all experts, mlp.experts.gate_up_proj[expert (gated emlp) embed] and
    mlp.experts.down_proj[expert embed emlp], and saves such files when it is asked not to keep the original format.

    matrices: for gate, up and down. Nothing for a model without experts.
    """
    if config.moe is None:
        return {}
    expert, (*wide, down) = range(config.moe.routing.experts), matrices
    each = f"{block}.experts.{{expert}}"
    up_of_all = HFTensor("mlp.experts.gate_up_proj", "expert (gated emlp) embed")
    down_of_all = HFTensor("mlp.experts.down_proj", "expert embed emlp")
    by_matrix = {"expert": expert, "gated": wide}
    return {
        "router": HFTensor(f"{block}.gate.weight", "route embed", other="mlp.gate.weight"),
        "experts_gate_up": HFStack(f"{each}.{{gated}}.weight", "emlp embed", by_matrix, up_of_all),
        "experts_down": HFStack(f"{each}.{down}.weight", "embed emlp", {"expert": expert}, down_of_all),
    }


def llama_names(config: DecoderConfig, spec: Any, **more: HFTensor | HFStack) -> dict[str, Any]:
    """The names of Llama and of all that are built like it, with a family's own leaves beside."""
    return names_of(spec, top=TOP, layer={**QKVO, **MLP, **PRE_NORMS, **more}, prefix=PREFIX)
