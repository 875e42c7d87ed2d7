"""Which model the settings of a run mean: a preset with overrides, a Hugging Face folder, or that of a checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from fmegatron.config import ExpertConfig, ModelOverrides, TrainConfig, nearest_name
from fmegatron.errors import UserError
from fmegatron.fp8 import Fp8, te
from fmegatron.models import PRESETS, Decoder, DecoderConfig
from fmegatron.models.decoder import GATED
from fmegatron.models.fused import FUSED
from fmegatron.models.hf import FAMILIES, fields_of, model_of
from fmegatron.models.hf_fields import shortest
from fmegatron.models.moe import MoE
from fmegatron.models.upcycle import upcycled_config
from fmegatron.parallel.routing import Routing
from fmegatron.precision import dtype_of
from fmegatron.remat import names, nothing
from fmegatron.sharding import Sharding
from fmegatron.spec import params_of
from fmegatron.split import everything

DEFAULT = "tiny"
VOCAB_MULTIPLE = 64  # a tiny preset's vocabulary is the tokenizer's rounded up, so that it divides over ranks


def model_name(config: TrainConfig) -> str:
    """What the model is called in a run's words: the preset, or the folder that it comes from."""
    return config.init_from or config.model or DEFAULT


def model_config(config: TrainConfig, tokenizer_vocab: int | None) -> DecoderConfig:
    """The model of a new run. The tiny presets take the tokenizer's vocabulary.

    tokenizer_vocab: None where it is not known yet.
    Raises UserError for an unknown preset, a Hugging Face folder that is not supported, overrides that do not fit it
    or each other, sequences longer than learned positions, and a vocabulary smaller than the tokenizer's.
    """
    sizes = _preset(config, tokenizer_vocab) if config.init_from is None else _pretrained(config)
    sizes = _long_enough(config, sizes)
    if tokenizer_vocab is not None and sizes.vocab < tokenizer_vocab:
        raise UserError(_too_small(config, sizes.vocab, tokenizer_vocab))
    return sizes


def resumed_model(config: TrainConfig, saved: DecoderConfig, where: str) -> DecoderConfig:
    """The model of a run that goes on from a checkpoint of `saved`; a Hugging Face folder is not read again.

    where: the checkpoint's path, for messages. Raises UserError when the settings ask for another model.
    """
    if config.init_from is None:
        wanted = dataclasses.replace(model_config(config, saved.vocab), init_std=saved.init_std)
        if saved.positions != "learned":
            wanted = dataclasses.replace(wanted, max_seq=max(saved.max_seq, config.batch.seq_len))
    else:
        vocab = config.resize_vocab or saved.vocab
        wanted = _replaced(config, saved, {"vocab": vocab, **_changes(config, saved)})
        wanted = _long_enough(config, wanted)
    for name in FUSED:
        if getattr(wanted, name) != getattr(saved, name):
            raise UserError(
                f"--resume: --model-overrides.{_flag(name)} is {getattr(wanted, name)}, but {where} was trained with "
                f"{getattr(saved, name)}, so its leaves are others: leave it out to go on as it began, or export the run "
                "and begin another with --init-from, which takes either"
            )
    free = ("dropout", "init_std", "mtp_weight", *(() if saved.positions == "learned" else ("max_seq",)))
    fields = [f.name for f in dataclasses.fields(saved) if f.name not in free]
    differ = [
        f"{n} {getattr(saved, n)} (now {getattr(wanted, n)})" for n in fields if getattr(saved, n) != getattr(wanted, n)
    ]
    if differ:
        raise UserError(
            f"--resume: {where} is of another model, with {', '.join(differ)}: leave --model and --model-overrides out, "
            "or name another --out"
        )
    return wanted


def pretrained_config(config: TrainConfig) -> DecoderConfig:
    """The model of --init-from with its vocabulary as asked, before any override."""
    assert config.init_from is not None
    try:
        return model_of(config.init_from, vocab=config.resize_vocab, ignore_fields=ignored_fields(config)).config
    except UserError as error:
        raise UserError(f"--init-from {config.init_from}: {_by_flag(str(error))}") from None


def ignored_fields(config: TrainConfig) -> tuple[str, ...]:
    """The names of --ignore-fields, which may be separated by commas or be several arguments."""
    return tuple(name for item in config.ignore_fields for name in item.replace(",", " ").split())


def computations(sizes: DecoderConfig) -> tuple[str, ...]:
    """The names of a layer's computations, by which --remat tells what is kept."""
    qkv: tuple[str, ...] = ("qkv",) if sizes.fused_qkv else ("q", "k", "v")
    if sizes.mla is not None:
        qkv = (*(("q",) if sizes.mla.q_rank is None else ("q_down", "q_up")), "kv_down", "kv_up")
    if sizes.activation not in GATED:
        first: tuple[str, ...] = ("up",)
    else:
        first = ("gate_up",) if sizes.fused_gate_up else ("gate", "up")
    dense = (*first, "down")
    if sizes.moe is not None:
        shared = tuple(f"shared_{n}" for n in dense) if sizes.moe.shared else ()
        experts = ("router", "experts_up", "experts_down", *shared)
        dense = (*experts, *dense) if sizes.moe.dense_layers else experts
    return (*qkv, "attention", "o", *dense, *(("join",) if sizes.mtp else ()))


def remat_policy(config: TrainConfig, sizes: DecoderConfig) -> Callable[[str], bool]:
    """What a layer keeps for its backward. Raises UserError for a name that the model's layers do not have."""
    if config.remat in ("everything", "nothing"):
        return {"everything": everything, "nothing": nothing}[config.remat]
    known, wanted = computations(sizes), [name.strip() for name in config.remat.split(",")]
    for name in wanted:
        if name not in known:
            raise UserError(
                f"--remat {config.remat}: {name!r} is no computation of this model's layers: use everything, nothing, "
                f"or some of {','.join(known)}"
            )
    return names(*wanted)


def make_fp8(config: TrainConfig) -> Fp8 | None:
    """How products run in fp8. Raises UserError for settings of fp8 that do not fit each other, or stand without --fp8."""
    p = config.precision
    settings = {f.name: getattr(p, f.name) for f in dataclasses.fields(p) if f.name.startswith("fp8_")}
    if config.fp8 is None:
        for f in dataclasses.fields(p):
            if f.name.startswith("fp8_") and settings[f.name] != f.default:
                raise UserError(
                    f"--precision.{_flag(f.name)} is for --fp8, which is not given: add --fp8 tensorwise, or leave it out"
                )
        return None
    if p.fp8_backend in ("native", "te") and (config.device == "cpu" or not torch.cuda.is_available()):
        raise UserError(f"--precision.fp8-backend {p.fp8_backend} needs a GPU: use auto or emulated")
    given = {name.removeprefix("fp8_"): value for name, value in settings.items()}
    keep = (*Fp8.keep, *(name for item in given.pop("keep") for name in item.replace(",", " ").split()))
    try:
        if p.fp8_backend == "te":
            te.check()
        return Fp8(config.fp8, keep=keep, **given)
    except UserError as error:
        raise UserError(f"--fp8 {config.fp8} with --precision.fp8-*: {error}") from None


def check_fp8(config: TrainConfig, sizes: DecoderConfig, sh: Sharding) -> None:
    """Raises UserError where a rank's matrices have no sizes that fp8 takes, and for what fp8 is not combined with."""
    fp8 = sh.precision.fp8
    if fp8 is None:
        return
    if config.overlap:
        raise UserError(
            f"--overlap {config.overlap} with --fp8 {config.fp8}: products in fp8 are not cut: leave --overlap out"
        )
    if fp8.keep_first + fp8.keep_last >= sizes.layers:
        raise UserError(
            f"--precision.fp8-keep-first {fp8.keep_first} and --precision.fp8-keep-last {fp8.keep_last} keep all "
            f"{sizes.layers} layers out of fp8: lower them, or leave --fp8 out"
        )
    if fp8.backend == "te" and config.compile:
        raise UserError("--precision.fp8-backend te cannot be compiled: leave --compile out, or use native")
    if config.fp8 == "delayed" and sh.mesh is not None and "pp" in sh.mesh.sizes:
        raise UserError(
            f"--fp8 delayed with --mesh {config.mesh}: no stage of a pipeline has the history of all layers: use another "
            "recipe, such as tensorwise"
        )
    if fp8.unaligned == "keep":
        return
    kv, group = sh.local_size("kv", sizes.kv_heads), sh.local_size("group", sizes.group)
    mlp, one = sh.local_size("mlp", sizes.mlp), kv * sizes.head
    widths = {"q": group * one, "k": one, "v": one, "o": group * one, "qkv": (group + 2) * one}
    if (m := sizes.mla) is not None:
        widths = {"q": one, "q_up": one, "q_down": m.q_rank or 0, "kv_down": m.kv_rank + m.rope}
        widths |= {"kv_up": kv * (m.nope + m.value), "o": kv * m.value}
    widths |= {"gate": mlp, "up": mlp, "down": mlp, "gate_up": 2 * mlp, "join": 2 * sizes.embed}
    if sizes.moe is not None:
        expert, shared = sh.local_size("emlp", sizes.moe.mlp), sh.local_size("mlp", sizes.moe.shared)
        widths |= {"experts_up": expert, "experts_down": expert}
        widths |= {f"shared_{n}": 2 * shared if n == "gate_up" else shared for n in ("gate", "up", "down", "gate_up")}
    ranks = {n: 1 if sh.mesh is None else sh.mesh.size(sh.axes(n)) for n in ("batch", "seq")}
    rows = -(-config.batch.size // ranks["batch"])
    length = -(-config.batch.seq_len // ranks["seq"])
    tokens = {math.ceil(rows / config.batch.microbatches) * length, rows // config.batch.microbatches * length}
    names = [n for n in computations(sizes) if n != "attention" and not fp8.keeps(n)]
    names = [n for n in names if fp8.scales_groups or not n.startswith("experts_")]
    found = {f"{n} is {widths[n]} wide": widths[n] for n in names}
    found |= {f"the model is {sizes.embed} wide (embed)": sizes.embed}
    found |= {f"a microbatch has {n} tokens": n for n in tokens if n}
    for words, size in found.items():
        if size % fp8.multiple:
            raise UserError(
                f"--fp8 {config.fp8} needs sizes that are multiples of {fp8.multiple}, but on a rank {words}: change it, or give "
                "--precision.fp8-unaligned keep, by which such products stay in the compute format"
            )


def export_problem(sizes: DecoderConfig) -> str | None:
    """Why a model cannot be written for Hugging Face transformers, in words; None where it can."""
    try:
        fields_of(Decoder(sizes))
    except UserError as error:
        return str(error)
    return None


# --------------------------------------------------------------------------------------------------------------- parts


def _preset(config: TrainConfig, tokenizer_vocab: int | None) -> DecoderConfig:
    name = config.model or DEFAULT
    if name not in PRESETS:
        near = nearest_name(name, list(PRESETS))
        raise UserError(f"--model {name} is no preset; did you mean {near}? Presets: {', '.join(PRESETS)}")
    preset = PRESETS[name]
    given = _changes(config, preset)
    if {"embed", "heads"} & given.keys():
        given.setdefault("head", None)
    if "heads" in given:
        every = preset.mla is not None  # latent attention makes keys and values of each head
        given.setdefault("kv_heads", given["heads"] if every else math.gcd(given["heads"], preset.kv_heads or 1))
    if name.endswith("tiny") and tokenizer_vocab is not None and "vocab" not in given:
        given["vocab"] = -(-tokenizer_vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    sizes = _replaced(config, preset, given)
    return _replaced(config, sizes, _following(preset, sizes))


def _following(preset: DecoderConfig, sizes: DecoderConfig) -> dict[str, Any]:
    """What follows from a preset's sizes, for other sizes."""
    found: dict[str, Any] = {}
    if preset.embed_scale is not None and math.isclose(preset.embed_scale, math.sqrt(preset.embed)):
        found["embed_scale"] = math.sqrt(sizes.embed)
    if preset.attention_scale is not None and math.isclose(preset.attention_scale, preset.head**-0.5):
        found["attention_scale"] = sizes.head**-0.5
    if sizes.window is not None and "window" not in sizes.kinds:
        found |= {"window": None, "pattern": ()}
    elif sizes.window is not None:
        found["pattern"] = shortest(list(sizes.kinds))  # of fewer layers than the preset's pattern has
    if preset.rope_dim is not None:
        found["rope_dim"] = max(2, sizes.head * preset.rope_dim // preset.head // 2 * 2)
    return found


def _pretrained(config: TrainConfig) -> DecoderConfig:
    base = pretrained_config(config)
    given = _changes(config, base)
    if base.moe is None and (moe := given.pop("moe", None)) is not None:
        if (moe.mlp, moe.shared) != (base.mlp, 0):
            raise UserError(
                f"--moe.mlp {moe.mlp} --moe.shared {moe.shared} with the dense model of --init-from {config.init_from}: every expert "
                f"is a copy of its feed-forward part, {base.mlp} wide: leave them out"
            )
        try:
            base = upcycled_config(base, moe.routing, dense_layers=moe.dense_layers)
        except UserError as error:
            raise UserError(f"--moe with the dense model of --init-from {config.init_from}: {error}") from None
    for name, value in given.items():
        flag = f"--model-overrides.{_flag(name)}"
        if name == "mtp":
            continue
        if name == "vocab":
            raise UserError(f"{flag}: with --init-from the vocabulary is changed by --resize-vocab {value}")
        if name == "family" or not _same_shapes(base, name, value):
            raise UserError(
                f"{flag} would change the parameters of --init-from {config.init_from}: leave it out "
                "(settings that keep every parameter's shape may be overridden)"
            )
    return _replaced(config, base, given)


def _same_shapes(base: DecoderConfig, name: str, value: Any) -> bool:
    if name in FUSED:
        return True  # the same parameters, in other leaves

    def shapes(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
        return {path: p.shape for path, p in params_of(Decoder(c).spec()).items()}

    try:
        return shapes(dataclasses.replace(base, **{name: value})) == shapes(base)
    except UserError as error:
        # a window's pattern and its size are only together a model
        return name == "pattern" and "window" in str(error)


def _changes(config: TrainConfig, base: DecoderConfig) -> dict[str, Any]:
    """The overrides as fields of a DecoderConfig. Raises UserError for those that have no meaning for `base`."""
    o = config.model_overrides
    given = {f.name: getattr(o, f.name) for f in dataclasses.fields(ModelOverrides)}
    given = {n: v for n, v in given.items() if v is not None}
    if "rope_theta" in given:
        if base.positions != "rotary":
            raise UserError(
                f"--model-overrides.rope-theta {o.rope_theta}: {model_name(config)} has {base.positions} positions, not "
                "rotary ones: leave it out"
            )
        given["rope_base"] = given.pop("rope_theta")
    if "family" in given and given["family"] not in FAMILIES:
        near = nearest_name(given["family"], list(FAMILIES))
        raise UserError(
            f"--model-overrides.family {o.family} is not known; did you mean {near}? Families: {', '.join(FAMILIES)}"
        )
    if o.window == 0:
        if "window" in (o.pattern or ()):
            raise UserError("--model-overrides.window 0 takes all windows away: leave --model-overrides.pattern out")
        given |= {"window": None, "pattern": ()}
    if o.qk_norm == "none":
        given["qk_norm"] = None
    for name in ("attention_softcap", "logit_softcap"):
        if given.get(name) == 0:
            given[name] = None
    if (experts := _experts(config, base, given)) is not None:
        given["moe"] = experts
    if config.mtp is not None:
        given["mtp"] = config.mtp
    return given


def _experts(config: TrainConfig, base: DecoderConfig, given: dict[str, Any]) -> MoE | None:
    """The experts that --moe.* asks for; None where it says nothing. Raises UserError for settings that do not fit."""
    asked = {f.name: v for f in dataclasses.fields(ExpertConfig) if (v := getattr(config.moe, f.name)) is not None}
    asked.pop("two_passes", None)  # which is not the model's
    if base.moe is not None and base.moe.mlp == base.mlp and "mlp" in given:
        asked.setdefault("mlp", given["mlp"])  # where a family has one field for both
    if not asked:
        return None
    if base.moe is None and "experts" not in asked:
        raise UserError(
            f"--moe.{_flag(next(iter(asked)))} is for a model with experts, and {model_name(config)} has none: add "
            "--moe.experts, or leave it out"
        )
    if "dtype" in asked:
        asked["dtype"] = dtype_of(asked["dtype"])
    if asked.get("capacity") == 0:
        asked["capacity"] = None
    if "dense_layers" in asked:
        numbers = asked["dense_layers"].replace(",", " ").split()
        if not all(n.isdigit() and int(n) < given.get("layers", base.layers) for n in numbers):
            raise UserError(
                f"--moe.dense-layers {asked['dense_layers']} must be indices of the {given.get('layers', base.layers)} "
                "layers, such as 0,1"
            )
        asked["dense_layers"] = tuple(int(n) for n in numbers)
    form = {n: asked.pop(n) for n in ("mlp", "shared", "dense_layers") if n in asked}
    try:
        if base.moe is not None:
            return dataclasses.replace(base.moe, routing=dataclasses.replace(base.moe.routing, **asked), **form)
        asked = {"top_k": min(2, asked["experts"]), "normalised": asked.get("top_k", 2) > 1, **asked}
        return MoE(Routing(**asked), **{"mlp": given.get("mlp", base.mlp), **form})
    except UserError as error:
        raise UserError(f"--moe: {error}") from None


def _replaced(config: TrainConfig, base: DecoderConfig, given: dict[str, Any]) -> DecoderConfig:
    try:
        return dataclasses.replace(base, **{**given, "dropout": config.dropout, "mtp_weight": config.mtp_weight})
    except UserError as error:
        source = f"--init-from {config.init_from}" if config.init_from else f"--model {model_name(config)}"
        raise UserError(f"{source} with --model-overrides: {error}") from None


def _long_enough(config: TrainConfig, sizes: DecoderConfig) -> DecoderConfig:
    """The model for the sequences of the run. Learned positions are parameters: they never grow by themselves."""
    length = config.batch.seq_len
    if length <= sizes.max_seq:
        return sizes
    if sizes.positions == "learned":
        more = "" if config.init_from else f", or more positions, --model-overrides.max-seq {length}"
        raise UserError(
            f"--batch.seq-len {length} is longer than the {sizes.max_seq} learned positions of {model_name(config)}: "
            f"use at most {sizes.max_seq}{more}"
        )
    if sizes.rope_scaling is not None:  # whose form may depend on it
        return sizes
    return dataclasses.replace(sizes, max_seq=length)


def _too_small(config: TrainConfig, vocab: int, needed: int) -> str:
    smaller = f"{vocab} is smaller than the tokenizer's {needed} tokens"
    if config.resize_vocab is not None:
        return f"--resize-vocab {smaller}: use {needed} or more"
    if config.init_from is not None:
        return (
            f"--init-from {config.init_from}: its vocabulary of {smaller}: add --resize-vocab {needed} (or more), or use "
            "the tokenizer that belongs to the model"
        )
    given = config.model_overrides.vocab is not None
    source = "--model-overrides.vocab" if given else f"--model {model_name(config)}: its vocabulary of"
    return (
        f"{source} {smaller}: "
        f"set --model-overrides.vocab to {needed} or more, or use the tokenizer that belongs to the model"
    )


def _flag(name: str) -> str:
    return {"rope_base": "rope-theta"}.get(name, name.replace("_", "-"))


def _by_flag(message: str) -> str:
    """A message of `load_hf` in the words of the command line."""
    before, found, after = message.partition("load with ignore_fields=('")
    return f"{before}add --ignore-fields {after.removesuffix(chr(39) + ',)')}" if found else message
