"""Small models of every family, by name; a user's own by `module:object`."""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fmegatron.errors import UserError
from fmegatron.models import PRESETS, Decoder, DecoderConfig
from fmegatron.models.config import MLA
from fmegatron.models.fused import FUSED
from fmegatron.models.moe import MoE
from fmegatron.primitives import LinearScaling, Llama3Scaling

LOSS = {"label_smoothing": 0.1, "z_loss": 0.01}  # so that each part of the loss has a gradient that is checked
SHAPES = ((6, 3), (8, 2))  # query heads, kv heads: odd ones, and ones that tp=4 and tp=8 divide
LEGAL_VOCAB, ODD_VOCAB = 48, 101
SMALL = {"embed": 12, "head": 4, "mlp": 24, "layers": 2, "max_seq": 64}
EXPERTS, CHOSEN, EXPERT_WIDTH = 4, 2, 8
VARIES = ("heads", "kv_heads", "layers", "vocab", "tied", "dropout", "embed", "mlp", "head", "mtp", *FUSED)


def families() -> dict[str, str]:
    """{family: the preset that stands for it}: the first without windows or rotary scaling left out."""
    richest: dict[str, str] = {}
    for name, config in PRESETS.items():
        if config.family not in richest or _features(config) > _features(PRESETS[richest[config.family]]):
            richest[config.family] = name
    return richest


def _features(config: DecoderConfig) -> int:
    return sum(
        (config.window is not None, config.rope_scaling is not None, config.kv_heads < config.heads, not config.tied)
    )


def small_config(name: str = "llama", **changes: Any) -> DecoderConfig:
    """A preset, or a family's, in the smallest sizes that still have everything: 2 layers, both kinds of them where the
    family has windows, 6 query heads on 3 kv heads.

    changes: fields of the config in place of these. Raises UserError for a name that is none.
    """
    known = families()
    if name not in PRESETS and name not in known:
        raise UserError(
            f"model {name!r} is no family ({', '.join(known)}) and no preset: for a model of your own write module:object"
        )
    preset = PRESETS[known.get(name, name)]
    heads, kv_heads = SHAPES[0]
    given: dict[str, Any] = {**SMALL, "vocab": LEGAL_VOCAB, "heads": heads}
    given["kv_heads"] = kv_heads if preset.kv_heads < preset.heads else heads
    if preset.mla is not None:
        small = MLA(kv_rank=6, nope=4, rope=2, value=5, q_rank=None if preset.mla.q_rank is None else 8)
        given |= {"mla": small, "head": small.head}
    if preset.moe is not None:
        narrow = preset.moe.mlp == preset.mlp and "mlp" not in changes  # where they are one field
        given["mlp"] = EXPERT_WIDTH if narrow else given["mlp"]
    given |= changes
    if preset.moe is not None:
        given.setdefault("moe", _small_moe(preset, given["mlp"], given["layers"]))
    if "heads" in changes and "kv_heads" not in changes:
        every = preset.mla is not None  # which makes keys and values of each head
        given["kv_heads"] = given["heads"] if every else math.gcd(given["heads"], given["kv_heads"])
    if preset.embed_scale is not None:
        given.setdefault("embed_scale", math.sqrt(given["embed"]))
    if preset.attention_scale is not None:
        given.setdefault("attention_scale", 0.4)
    if preset.window is not None:
        given.setdefault("window", 3)
        given.setdefault("pattern", ("window", "full") if "full" in preset.kinds else ())
    if preset.rope_dim is not None:
        given.setdefault("rope_dim", max(2, given["head"] // 2))
    if isinstance(preset.rope_scaling, Llama3Scaling):
        given.setdefault("rope_scaling", Llama3Scaling(4.0, 1.0, 4.0, 16))
    elif preset.rope_scaling is not None and not isinstance(preset.rope_scaling, LinearScaling):
        given.setdefault("rope_scaling", None)  # of another size of head
    given.setdefault("rope_base", min(preset.rope_base, 500.0))
    return replace(preset, **given)


def _small_moe(preset: DecoderConfig, mlp: int, layers: int) -> MoE:
    """Its experts, few and narrow; of two layers or more one at most is dense."""
    moe = preset.moe
    assert moe is not None
    groups = {"groups": 2, "group_top_k": 1} if moe.routing.groups > 1 else {}
    routing = replace(moe.routing, experts=EXPERTS, top_k=CHOSEN, **groups)  # type: ignore[arg-type]
    width = mlp if moe.mlp == preset.mlp else EXPERT_WIDTH
    shared = EXPERT_WIDTH * (moe.shared // moe.mlp)
    return replace(moe, routing=routing, mlp=width, shared=shared, dense_layers=moe.dense_layers[: min(1, layers - 1)])


def small_model(name: str = "llama", **changes: Any) -> Decoder:
    """`small_config` as a model, with label smoothing and z-loss on."""
    return Decoder(small_config(name, **changes), **LOSS)  # type: ignore[arg-type]


def find_model(text: str) -> Any:
    """The model that a command line means: a preset or family in small sizes, with changes behind commas, such as
    `llama,heads=8,kv_heads=2,tied=1` (fused=1: both kinds of fused leaves); or `module:object`, an object or module with spec and loss.

    Raises UserError for what is not there.
    """
    name, *changes = text.split(",")
    if ":" in name:
        module, _, attribute = name.partition(":")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            found = importlib.import_module(module)
            for part in filter(None, attribute.split(".")):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise UserError(f"model {text!r}: {error}") from None
        return found
    changes = [c for change in changes for c in _spelt_out(change)]
    return small_model(name, **dict(_change(text, c) for c in changes))


def model_text(model: Any) -> str | None:
    """What `find_model` reads back, for a small model of a family; None for any other."""
    config = getattr(model, "config", None)
    if not isinstance(config, DecoderConfig):
        return None
    base = small_config(config.family)
    differ = [n for n in VARIES if getattr(config, n) != getattr(base, n)]
    text = ",".join([config.family, *(f"{n}={_plain(getattr(config, n))}" for n in differ)])
    try:
        return text if find_model(text).config == config else None
    except UserError:
        return None


def variants(name: str, shapes: Sequence[tuple[int, int]] = SHAPES) -> list[str]:
    """Small models of a family as `find_model` reads them: shapes of heads, a vocabulary that divides over ranks and
    one that does not, tied or not, dropout or not."""
    base = small_config(name)
    every = base.kv_heads == base.heads
    found = []
    for heads, kv_heads in shapes:
        for vocab in (LEGAL_VOCAB, ODD_VOCAB):
            for tied in (False, True):
                for dropout in (0.0, 0.2):
                    changes: dict[str, Any] = {"heads": heads, "kv_heads": heads if every else kv_heads, "vocab": vocab}
                    changes |= {"tied": tied, "dropout": dropout}
                    differ = [f"{n}={_plain(v)}" for n, v in changes.items() if getattr(base, n) != v]
                    found.append(",".join([name, *differ]))
    return found


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def _spelt_out(change: str) -> list[str]:
    field, _, value = change.partition("=")
    return [f"{n}={value}" for n in FUSED] if field == "fused" else [change]


def _change(text: str, change: str) -> tuple[str, Any]:
    field, _, value = change.partition("=")
    types = {f.name: f.type for f in dataclasses.fields(DecoderConfig)}
    try:
        if field not in VARIES:
            raise ValueError
        if types[field] == "bool":
            return field, {"0": False, "1": True}[value]
        return field, float(value) if types[field] == "float" else int(value)
    except (ValueError, KeyError):
        raise UserError(f"model {text!r}: {change!r} is not one of {', '.join(VARIES)} with a number") from None
