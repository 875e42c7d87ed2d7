"""Leaves that hold several matrices, so that one product makes what each of them would.

    fused_qkv      qkv      "embed kv qkv head"   per kv head its group of queries, its key, its value, as in Megatron-LM
    fused_gate_up  gate_up  "embed mlp gated"     by turns: gate 0, up 0, gate 1, up 1, …

and their biases without `embed`. kv heads and `mlp` are cut over ranks as they are apart, so a rank's shard needs no
permutation. Where `group` is cut too (more tensor-parallel ranks than kv heads), each rank holds all queries of its
kv heads, and multiplies by its own.

Gate and up lie by turns since quack-kernels' products take them so (see `fmegatron.primitives.gated_mlp`): neither
weight nor gradient is copied. (A mixture's `experts_gate_up`, which is no option, has them as halves.)

What is gained is the time in which small products leave a processor idle, so neither is the default: try `fused_qkv`
where a rank has few or grouped heads. Measured by tests/bench/fused.py as time of fused / apart, forward and
backward. One H200, bf16, 16384 tokens, with gate and up as halves and by torch's kernels: whole models, compiled,
1.01 at 1.2B (16 kv heads) and 1.00 at 3.0B (8 kv heads, 24 of queries); uncompiled 1.07 at 1.2B, which is gate and
up: the activations' kernels read half rows slowly. Queries, keys and values alone, uncompiled: 0.85 with 4 kv heads
of 16; in a half to an eighth of the model, as tensor parallelism leaves a rank, 0.9 to 0.65. One CPU core, fp32,
width 256: queries, keys and values 0.96; a model with gate and up 1.03 to 1.07, compiled or not. What gate and up
gain is in quack-kernels' products (see `fmegatron.kernels.quack`).

As much is kept for backward as apart: what is read there is copied out of the product where nothing else would keep it. Nothing is where flash-attn-4 takes queries and keys turned where they lie,
one head of queries to each of keys (see `fmegatron.primitives.rotary_attention`).
Of optimizers, muon finds the matrices in a fused leaf, and adafactor takes the leaf as it is; rates by path, and patterns,
name `qkv` and `gate_up`.

    fuse(params, config), unfuse(params, config)

convert trees of parameters, or of anything that is a tree like them: gradients, moments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.dtensor import DTensor
from fmegatron.errors import UserError
from fmegatron.models.config import DecoderConfig
from fmegatron.primitives import split_qkv

FUSED = ("fused_qkv", "fused_gate_up")  # the fields of the config
GATED_NAMES = ("gate", "up")
SHARED = "shared_"  # in front of the names of the expert that every token has
MATRICES = {"qkv": ("q", "k", "v"), "gate_up": GATED_NAMES}
MATRICES |= {f"{SHARED}gate_up": tuple(f"{SHARED}{n}" for n in GATED_NAMES)}
JOINED = MATRICES | {f"{n}_bias": tuple(f"{m}_bias" for m in parts) for n, parts in MATRICES.items()}


@dataclass(frozen=True)
class Part:
    """One matrix (or bias) in a fused leaf.

    name: of the leaf that it is apart. leaf: of the fused one. dim: the joined dim. start, stop: its place there. own: the
    name that this dim has apart; None: it has none, being one row.
    """

    name: str
    leaf: str
    dim: str
    start: int
    stop: int
    own: str | None = None

    def of(self, whole: Any, at: int) -> Any:
        """The part of a whole tensor whose joined dim is at position `at`: a view."""
        return whole.narrow(at, self.start, self.stop - self.start) if self.own else whole.select(at, self.start)

    def joinable(self, x: Any, at: int) -> Any:
        """The part with the joined dim that it lacks."""
        return x if self.own else x.unsqueeze(at)


def parts(config: DecoderConfig) -> dict[str, tuple[Part, ...]]:
    """{fused leaf of a layer: its parts in order}, of both kinds, whether the model has them or not."""
    group = config.group
    places = {"q": (0, group, "group"), "k": (group, group + 1, None), "v": (group + 1, group + 2, None)}
    places |= {n: (i, i + 1, None) for i, n in enumerate(GATED_NAMES)}
    found = {}
    for leaf, names in JOINED.items():
        dim = "qkv" if leaf.startswith("qkv") else "gated"
        found[leaf] = tuple(Part(n, leaf, dim, *places[n.removesuffix("_bias").removeprefix(SHARED)]) for n in names)
    return found


def part_of(config: DecoderConfig) -> dict[str, Part]:
    """{leaf of a layer, apart: its place in a fused one}."""
    return {part.name: part for group in parts(config).values() for part in group}


def unfused(config: DecoderConfig) -> DecoderConfig:
    """The same model with every matrix a leaf of its own."""
    return dataclasses.replace(config, fused_qkv=False, fused_gate_up=False)


# ------------------------------------------------------------------------------------------------------ in the block


def own_rows(w: Tensor, at: int, group: int, sh: Any) -> Tensor:
    """What of a fused leaf's dim `qkv` (at position `at`) this rank multiplies by: all of it, or where mesh axes hold
    `group` the queries of its part of them, and key and value, which the ranks of these axes have alike."""
    if not sh.axes("group"):
        return w
    return torch.cat([w.index_select(at, sh.index("group", group, device=w.device)), w.narrow(at, group, 2)], at)


def copied_qkv(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`split_qkv` of y, copies, which do not keep it alive."""
    q, k, v = (x.contiguous() for x in split_qkv(y))
    return q, k, v


# -------------------------------------------------------------------------------------------------------- whole trees


def fuse(params: Any, config: DecoderConfig, *, sh: Any = None) -> Any:
    """The tree of the model `config`, which has fused leaves, from one of the same model with every matrix apart.

    params: parameters, or a tree like them; None leaves are kept. sh: where the new leaves lie at rest, needed for
    leaves that are DTensors, which every rank gathers one at a time. Raises UserError for a tree that is not of this
    model.
    """
    return _converted("fuse", params, unfused(config), config, sh)


def unfuse(params: Any, config: DecoderConfig, *, sh: Any = None) -> Any:
    """The tree with every matrix apart from one of the model `config`. Arguments as for `fuse`; what it takes apart are
    copies, since products and updates read rows with gaps slowly."""
    return _converted("unfuse", params, config, unfused(config), sh)


def _converted(what: str, params: Any, source: DecoderConfig, target: DecoderConfig, sh: Any) -> Any:
    from fmegatron.models.decoder import Decoder

    before, after = (Decoder(config).spec() for config in (source, target))
    have, old, new = tree.named(params), tree.named(before), tree.named(after)
    if have.keys() != old.keys():
        wrong = sorted(have.keys() ^ old.keys())
        raise UserError(
            f"{what}: params are not those of this model {'apart' if what == 'fuse' else 'fused'}: they differ in "
            f"{', '.join(wrong[:4])}; give a tree like its spec"
        )
    leaf = _joined if what == "fuse" else _apart
    found = {
        path: have[path] if path in have else leaf(path, param, have, old, target, sh) for path, param in new.items()
    }
    return tree.like(after, [found[path] for path in new])


def _joined(path: str, param: Any, have: Mapping[str, Any], old: Mapping[str, Any], config: Any, sh: Any) -> Any:
    layer, _, name = path.rpartition(".")
    pieces = parts(config)[name]
    xs = [have[f"{layer}.{p.name}"] for p in pieces]
    if all(x is None for x in xs):
        return None
    if any(x is None for x in xs):
        raise UserError(
            f"fuse: of {path} some parts are None and some are not ({', '.join(p.name for p in pieces)}): frozen and "
            "trained matrices cannot be one leaf"
        )
    at = param.names.index(pieces[0].dim)
    return _at_rest(
        xs, lambda ts: torch.cat([p.joinable(t, at) for p, t in zip(pieces, ts, strict=True)], at), param, sh
    )


def _apart(path: str, param: Any, have: Mapping[str, Any], old: Mapping[str, Any], config: Any, sh: Any) -> Any:
    layer, _, name = path.rpartition(".")
    part = part_of(config)[name]
    source = f"{layer}.{part.leaf}"
    if have[source] is None:
        return None
    at = old[source].names.index(part.dim)
    return _at_rest([have[source]], lambda ts: part.of(ts[0], at).contiguous(), param, sh)


def _at_rest(xs: list[Any], f: Callable[[list[Any]], Any], param: Any, sh: Any) -> Any:
    """f of plain tensors; of DTensors, this rank's shard of what f makes of them whole."""
    if not any(isinstance(x, DTensor) for x in xs):
        return f(xs)
    if sh is None:
        raise UserError("params are DTensors: give sh=, the Sharding by which the converted leaves lie at rest")
    whole = f([x.full_tensor() for x in xs])
    for d, held in enumerate(sh.stored_index(param)):
        whole = whole if held is None else whole.index_select(d, held.to(whole.device))
    return sh.at_rest(whole.contiguous(), param)
