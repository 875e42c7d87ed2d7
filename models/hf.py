"""Models from and to folders of Hugging Face transformers: config.json, safetensors, tokenizer files.

    model, params = load_hf("folder", sh=sh)
    save_hf("other", model, params, tokenizer="folder")

A family is a module beside this one with `config_from_hf(fields, ignore=…) -> config`, `config_to_hf(config) -> fields`
and `hf_map(config, spec) -> {our dotted name: HFTensor or HFStack}`, of a model whose matrices are all apart. A fused leaf (see
`fmegatron.models.fused`) is read part by part, and written so; so are experts, each of which has tensors of its own (files that
have one tensor for all of them are read too).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from fmegatron import tree
from fmegatron.checkpoint.ranks import is_first, on_first, together
from fmegatron.data.tokenizer import load_tokenizer, save_tokenizer
from fmegatron.dtensor import DTensor
from fmegatron.errors import UserError
from fmegatron.models import mxfp4
from fmegatron.models import safetensors_files as files
from fmegatron.models.config import DecoderConfig
from fmegatron.models.decoder import Decoder
from fmegatron.models.fused import FUSED, Part, part_of, parts, unfused
from fmegatron.models.hf_names import PREFIX, HFStack, HFTensor
from fmegatron.models.moe import MoE
from fmegatron.precision import dtype_name, dtype_of
from fmegatron.random import Key, fold_in, key, normal
from fmegatron.sharding import Sharding
from fmegatron.spec import Param, params_of

# config.json's model_type: the family's module.
FAMILIES = {
    "llama": "fmegatron.models.llama",
    "mistral": "fmegatron.models.mistral",
    "qwen2": "fmegatron.models.qwen",
    "qwen3": "fmegatron.models.qwen",
    "gemma2": "fmegatron.models.gemma",
    "gemma3_text": "fmegatron.models.gemma",
    "phi3": "fmegatron.models.phi",
    "olmo2": "fmegatron.models.olmo",
    "gpt2": "fmegatron.models.gpt",
    "mixtral": "fmegatron.models.mixtral",
    "qwen2_moe": "fmegatron.models.qwen_moe",
    "qwen3_moe": "fmegatron.models.qwen_moe",
    "olmoe": "fmegatron.models.olmoe",
    "gpt_oss": "fmegatron.models.gpt_oss",
    "deepseek_v2": "fmegatron.models.deepseek",
    "deepseek_v3": "fmegatron.models.deepseek",
}

# Constant tables that old versions of transformers saved beside the parameters.
NOT_PARAMETERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
HEAD = "lm_head.weight"  # the output matrix; a tied model's files may hold it as well
SCALES = (
    "_scale_inv"  # behind the name of a tensor in fp8: the scale of each block, by which its elements are multiplied
)
# A new row of the vocabulary is the mean of the old ones plus this share of their standard deviation.
NEW_ROW_NOISE = 0.01
ROWS = 4096  # rows of the vocabulary read at once for their mean

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
GENERATION = "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Fields of `Routing` that act in training, as dropout does.
ROUTING_OF_TRAINING = frozenset(
    "switch_loss z_loss jitter capacity drop pad force skewed_share skewed_experts group dtype bias_rate".split()
)
# In the header of every file that save_hf writes: how it knows a folder of its own.
MADE_BY = {"format": "pt", "made_by": "fmegatron"}
SHOWN = 8  # names listed in an error


# Loading


def load_hf(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    sh: Sharding | None = None,
    device: torch.device | str | None = None,
    held: Callable[[Any], Any] | None = None,
    vocab: int | None = None,
    seed: int = 0,
    ignore_fields: tuple[str, ...] = (),
    **overrides: Any,
) -> tuple[Decoder, Any]:
    """(model, params) of a folder that transformers wrote. Each rank reads and allocates its own shards only.

    dtype: of the parameters; None means that of sh.precision, which is float32 by default.
    sh: where parameters lie; the leaves are then DTensors at rest. None means plain tensors.
    device: where to; None means sh's, which is the CPU by default.
    held: of a tree like the model's parameters what this rank of a pipeline holds (`Pipeline.held`): the parameters are
        those, and no others are read. Every rank must then call it, and what is raised on one is raised on all.
    vocab: another size of the vocabulary. Fewer rows: the last ones are left out. More: each new row of the embedding
        and of the output matrix is the mean of the old rows, so that no new token outweighs the old ones (Hewitt 2021),
        plus 1 % of their standard deviation times normal noise, drawn from `seed` by global position.
    ignore_fields: fields of config.json that are not known here and that you know to change nothing.
    overrides: fields of the family's config or of its model that replace those of config.json (dropout=0.1,
        fused_qkv=True). mtp=…: prediction modules (`fmegatron.models.mtp`), by default as many as the files have; fewer are the
        first ones, and those that the files lack are drawn from `seed`.

    Raises UserError, before anything is allocated, for an absent or damaged file, a family or a field that is not
    supported, and for tensors that are missing, extra, or of another shape, naming them.
    """
    folder = Path(folder)
    sh = sh or Sharding()
    model = model_of(folder, vocab=vocab, ignore_fields=ignore_fields, **overrides)
    spec = model.spec() if held is None else held(model.spec())
    params = params_of(spec)
    found = files.tensors_of(folder)
    there = _with_modules(model, _modules_in(model.config, found))
    apart, layout, stacks = _apart(there, found)
    layout = _as_in_file(layout, found)
    fields = read_config(folder)
    saved_vocab, block = fields["vocab_size"], _block_of(fields, folder / "config.json")
    copies = _copies(there)

    def check() -> None:
        sh.check_spec(spec)
        ignored = [*copies, *_further_modules(there.config, found)]
        _check(folder, found, apart, layout, model.config.tied, saved_vocab, block, ignored)
        if model.config.tied and "embed" in params:
            _check_tied(folder, found, layout["embed"].name)
        for name, ours in copies.items():
            if ours in params and name in found and not _same(found, name, layout[ours].name):
                raise UserError(
                    f"{folder}: {name} is not {layout[ours].name}, which prediction modules share: load with mtp=0 to do without "
                    "them"
                )

    check() if held is None else together(check)
    leaves: dict[str, torch.Tensor] = {}
    drawn = {path for path in params if path not in params_of(there.spec())}
    with contextlib.ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def file_of(name: str) -> Any:
            file = found[name].file
            if file not in opened:
                opened[file] = stack.enter_context(files.opened(file))
            return opened[file]

        def source(path: str) -> Source:
            name, scales = layout[path].name, None
            if found[name].code == files.BLOCK_SCALED and block is not None:
                scales = Scales(file_of(name + SCALES), block)
            elif mxfp4.is_packed(name):
                scales = Scales(file_of(mxfp4.scales_of(name)), (1, mxfp4.BLOCK))
            return Source(file_of(name), apart[path], layout[path], scales)

        for path, param in params.items():
            wanted = param.dtype or (sh.precision.params if dtype is None else dtype_of(dtype))
            if path in drawn:
                root = fold_in(fold_in(key(seed), "init"), path)
                x = param.init(root, param.shape, index=sh.stored_index(param), dtype=wanted)
            elif path in stacks:
                x = _read_stacked(stacks[path], source, param, sh, wanted)
            elif path not in apart:
                x = _read_joined({p: source(_sibling(path, p.name)) for p in _pieces(path, model)}, param, sh, wanted)
            elif "vocab" in param.names and model.config.vocab > saved_vocab:
                x = _read_with_new_rows(source(path), sh, wanted, saved_vocab, fold_in(key(seed), path))
            else:
                x = _read(source(path), sh, wanted)
            leaves[path] = sh.at_rest(x.to(device if device is not None else sh.device), param)
    return model, tree.like(spec, [leaves[path] for path in params])


def family_of(model: Any) -> Any:
    """The module of a model's family. Raises UserError for a model that has none."""
    kind = getattr(getattr(model, "config", None), "family", None)
    if kind not in FAMILIES:
        raise UserError(
            f"{type(model).__name__} of family {kind!r} has no Hugging Face layout: only {', '.join(FAMILIES)} have"
        )
    return importlib.import_module(FAMILIES[kind])


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. Raises UserError when there is none or it is not JSON."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise UserError(f"folder {str(folder)!r} does not exist: give a folder with config.json and safetensors files")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} has no config.json: it is no folder of a Hugging Face model") from None
    except (OSError, ValueError) as e:
        raise UserError(f"{path} cannot be read ({e})") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path} must hold a JSON object")
    return fields


def model_of(
    folder: str | os.PathLike[str],
    *,
    vocab: int | None = None,
    ignore_fields: tuple[str, ...] = (),
    **overrides: Any,
) -> Decoder:
    """The model that a folder's config.json describes. Arguments and errors as for `load_hf`."""
    folder = Path(folder)
    fields = read_config(folder)
    kind = fields.get("model_type")
    if kind not in FAMILIES:
        raise UserError(f"{folder / 'config.json'}: model_type {kind!r} is not supported: only {', '.join(FAMILIES)}")
    _block_of(fields, folder / "config.json")
    fields = {n: v for n, v in fields.items() if n != "quantization_config"}
    try:
        config = importlib.import_module(FAMILIES[kind]).config_from_hf(fields, ignore=ignore_fields)
    except KeyError as e:
        raise UserError(f"{folder / 'config.json'} has no field {e.args[0]!r}") from None
    of_config = {f.name for f in dataclasses.fields(config)} - {"vocab", "family"}
    of_model = {f.name for f in dataclasses.fields(Decoder) if f.init} - {"config"}
    if unknown := [n for n in overrides if n not in of_config | of_model]:
        raise UserError(
            f"load_hf: {unknown[0]!r} is no field of {kind}: it has {', '.join(sorted(of_config | of_model))}"
        )
    changes = {n: v for n, v in overrides.items() if n in of_config}
    if config.mtp and "mtp" not in changes:  # which files may lack, whatever config.json says
        with contextlib.suppress(UserError):  # a folder without files, of which the loader tells
            changes["mtp"] = _modules_in(config, files.tensors_of(folder))
    config = dataclasses.replace(config, **changes, **({} if vocab is None else {"vocab": vocab}))
    return Decoder(config, **{n: v for n, v in overrides.items() if n in of_model})


class Slices(NamedTuple):
    """The parts of a leaf that are tensors of their own: dims by which they are told apart, and each one's path."""

    dims: tuple[str, ...]
    paths: dict[tuple[int, ...], str]


def _apart(
    model: Any, found: Mapping[str, files.Found] | None = None
) -> tuple[dict[str, Param], dict[str, HFTensor], dict[str, Slices]]:
    """({path: parameter}, {path: where it is in a folder}, {path of a leaf: its parts}) of the model with every matrix a
    leaf of its own, experts' matrices too, but for those that are one tensor among the files `found`."""
    spec = dataclasses.replace(model, config=unfused(model.config)).spec()
    named = family_of(model).hf_map(model.config, spec)
    params: dict[str, Param] = {}
    layout: dict[str, HFTensor] = {}
    stacks: dict[str, Slices] = {}
    for path, param in params_of(spec).items():
        where = named[path]
        if isinstance(where, HFStack) and where.joined is not None and where.joined.name in (found or {}):
            where = where.joined
        if not isinstance(where, HFStack):
            params[path], layout[path] = param, where
            continue
        each = where.apart(path, param)
        stacks[path] = Slices(tuple(where.slices), {at: name for at, (name, _, _) in each.items()})
        params |= {name: part for name, part, _ in each.values()}
        layout |= {name: tensor for name, _, tensor in each.values()}
    return params, layout, stacks


def _pieces(path: str, model: Any) -> tuple[Part, ...]:
    """The parts of a fused leaf."""
    return parts(model.config)[path.rpartition(".")[2]]


def _sibling(path: str, name: str) -> str:
    """The path of another leaf of the same layer."""
    return ".".join([*path.split(".")[:-1], name])


def _block_of(fields: Mapping[str, Any], where: Path) -> tuple[int, int] | None:
    """The rows and columns of a block that has one scale, of weights in fp8 as DeepSeek publishes them; None for weights that
    are not quantized. Raises UserError for others."""
    how = fields.get("quantization_config")
    if not how or how.get("quant_method") == "mxfp4":  # whose tensors say by their names that they are quantized
        return None
    block: list[int] = list(how.get("weight_block_size") or [])
    if how.get("quant_method") != "fp8" or how.get("fmt", "e4m3") != "e4m3" or len(block) != 2:
        raise UserError(
            f"{where}: quantization_config of quant_method {how.get('quant_method')!r}: quantized weights are not supported, "
            "but for fp8 (e4m3) with a weight_block_size, and mxfp4"
        )
    return int(block[0]), int(block[1])


def _as_in_file(layout: Mapping[str, HFTensor], found: Mapping[str, files.Found]) -> dict[str, HFTensor]:
    """The layout with names as the files have them: a bare model's (GPT-2 as it was published) lack the first part, and
    tensors in MXFP4 are packed."""

    def actual(t: HFTensor) -> HFTensor:
        if t.name not in found and t.other is not None and t.other in found:
            return dataclasses.replace(t, name=t.other)
        bare = t.name.split(".", 1)[1]
        if t.name not in found and bare in found:
            return dataclasses.replace(t, name=bare)
        return mxfp4.packed(t) if t.name not in found and t.name + mxfp4.BLOCKS in found else t

    return {path: actual(t) for path, t in layout.items()}


def _check(
    folder: Path,
    found: Mapping[str, files.Found],
    params: Mapping[str, Param],
    layout: Mapping[str, HFTensor],
    tied: bool,
    saved_vocab: int,
    block: tuple[int, int] | None = None,
    others: Sequence[str] = (),
) -> None:
    as_saved = {path: _with_vocab(param, saved_vocab) for path, param in params.items()}
    expected = {layout[path].name: layout[path].shape(param) for path, param in as_saved.items()}
    in_bytes = {n: s for b in filter(mxfp4.is_packed, expected) for n, s in mxfp4.shapes(b, expected[b]).items()}
    expected |= in_bytes
    ignored = {n for n in found if n.endswith(NOT_PARAMETERS) or tied and n == HEAD} | {*others}
    both = [n for n in expected if n in found]
    scaled = [n for n in both if block is not None and found[n].code == files.BLOCK_SCALED and len(expected[n]) == 2]
    for n in scaled:
        assert block is not None
        expected[n + SCALES] = (-(-expected[n][0] // block[0]), -(-expected[n][1] // block[1]))
    both += [n + SCALES for n in scaled if n + SCALES in found]
    problems = {
        "missing": [n for n in expected if n not in found],
        "unknown": [n for n in found if n not in expected and n not in ignored],
        "of another shape": [
            f"{n} ({list(found[n].shape)} in the file, {list(expected[n])} by config.json)"
            for n in both
            if found[n].shape != expected[n]
        ],
        "of an unsupported dtype": [
            f"{n} ({found[n].code})"
            for n in both
            if found[n].code not in (files.BYTES if n in in_bytes else files.DTYPES) and n not in scaled
        ],
    }
    if any(problems.values()):
        raise UserError(f"the tensors in {folder} do not fit its config.json: {_listed(problems)}")


def _check_tied(folder: Path, found: Mapping[str, files.Found], table: str) -> None:
    """An output matrix beside a tied embedding must equal it: transformers takes it where it does not."""
    if HEAD not in found:
        return
    if not _same(found, HEAD, table):
        raise UserError(
            f"the tensors in {folder} do not fit its config.json: it ties the output matrix to the embedding, but "
            f"{HEAD} is not {table}: set tie_word_embeddings to false there, or load with tied=False, to use it"
        )


def _same(found: Mapping[str, files.Found], one: str, other: str) -> bool:
    """Are two matrices in a folder's files equal?"""
    same = found[one].shape == found[other].shape
    if same:
        rows, width = found[other].shape
        with files.opened(found[one].file) as f, files.opened(found[other].file) as g:
            for start in range(0, rows, ROWS):
                runs = [[(start, min(start + ROWS, rows))], [(0, width)]]
                a, b = (files.part_of(x, n, runs, torch.float64) for x, n in ((f, one), (g, other)))
                same = same and torch.equal(a, b)
    return same


# Prediction modules, which files of a family may have: its module then has `module_tensor` and `copies`.


def _modules_in(config: DecoderConfig, found: Mapping[str, files.Found]) -> int:
    """How many of a model's prediction modules are in a folder's files."""
    named = getattr(_module_of(config), "module_tensor", None)
    there = [named is not None and named(config, k) in found for k in range(config.mtp)]
    return there.index(False) if False in there else config.mtp


def _further_modules(config: DecoderConfig, found: Mapping[str, files.Found]) -> list[str]:
    """The tensors of prediction modules that files have beyond those of the model."""
    if not hasattr(_module_of(config), "module_tensor"):
        return []
    module, behind = re.compile(rf"{re.escape(PREFIX)}\.(\d+)\."), config.layers + config.mtp
    numbers = {int(m[1]) for n in found if (m := module.match(n))}
    named = [i for i in numbers if i >= behind and _module_of(config).module_tensor(config, i - config.layers) in found]
    return [n for n in found if (m := module.match(n)) and int(m[1]) in named]


def _with_modules(model: Decoder, number: int) -> Decoder:
    if number == model.config.mtp:
        return model
    return dataclasses.replace(model, config=dataclasses.replace(model.config, mtp=number))


def _copies(model: Any) -> dict[str, str]:
    """{tensor: our parameter} of the tensors that repeat another one."""
    made = getattr(family_of(model), "copies", None)
    return {} if made is None or not model.config.mtp else made(model.config)


def _module_of(config: DecoderConfig) -> Any:
    return importlib.import_module(FAMILIES[config.family])


def _with_vocab(param: Param, vocab: int) -> Param:
    """A parameter for another size of the vocabulary."""
    shape = tuple(vocab if n == "vocab" else size for n, size in zip(param.names, param.shape, strict=True))
    return dataclasses.replace(param, shape=shape)


def _listed(problems: Mapping[str, list[str]]) -> str:
    texts = []
    for what, names in problems.items():
        if names:
            more = f", … and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            texts.append(f"{len(names)} {what}: {', '.join(names[:SHOWN])}{more}")
    return "; ".join(texts)


class Scales(NamedTuple):
    """The scales of a tensor in fp8 or MXFP4: an open file, and the rows and columns that have one in common."""

    file: Any
    block: tuple[int, int]


class Source(NamedTuple):
    """Where a parameter is read: an open file, its tensor there, and that tensor's scales."""

    file: Any
    param: Param
    layout: HFTensor
    scales: Scales | None = None


Held = Mapping[str, torch.Tensor | None]  # the positions of each dim that a rank holds; None: all


def _held(param: Param, sh: Sharding) -> Held:
    return dict(zip(param.names, sh.stored_index(param) or [None] * len(param.shape), strict=True))


def _read(source: Source, sh: Sharding, dtype: torch.dtype) -> torch.Tensor:
    """This rank's shard of a parameter."""
    return _read_part(source, _held(source.param, sh), dtype)


def _read_joined(sources: Mapping[Part, Source], param: Param, sh: Sharding, dtype: torch.dtype) -> torch.Tensor:
    """This rank's shard of a fused leaf, of which it reads what it holds of each part."""
    held, found = _held(param, sh), []
    for part, source in sources.items():
        at, rows = param.names.index(part.dim), held[part.dim]
        if rows is not None:
            rows = rows[(rows >= part.start) & (rows < part.stop)] - part.start
            if not len(rows):
                continue
        mine = {n: held[n] if n in held else rows for n in source.param.names}
        found.append(part.joinable(_read_part(source, mine, dtype), at))
    return torch.cat(found, at)


def _read_stacked(
    slices: Slices, source: Callable[[str], Source], param: Param, sh: Sharding, dtype: torch.dtype
) -> torch.Tensor:
    """This rank's shard of a leaf whose parts are tensors of their own, of which it reads those that it holds."""
    held, size = _held(param, sh), dict(zip(param.names, param.shape, strict=True))
    index = {n: range(size[n]) if at is None else at.tolist() for n, at in held.items()}
    out = torch.empty([len(index[n]) for n in param.names], dtype=dtype)
    rest = [n for n in param.names if n not in slices.dims]
    by_slice = out.permute([param.names.index(n) for n in (*slices.dims, *rest)])
    for places in itertools.product(*(range(len(index[n])) for n in slices.dims)):
        at = tuple(index[n][i] for n, i in zip(slices.dims, places, strict=True))
        by_slice[places].copy_(_read_part(source(slices.paths[at]), {n: held[n] for n in rest}, dtype))
    return out


def _read_part(source: Source, held: Held, dtype: torch.dtype) -> torch.Tensor:
    """The part of a parameter at the positions `held`, in our order of dims."""
    f, param, layout, scales = source
    size = dict(zip(param.names, param.shape, strict=True))
    runs = [_runs(group, size, held) for group in layout.groups]
    runs[layout.dim] = [(a + layout.start, b + layout.start) for a, b in runs[layout.dim]]
    if scales is None:
        part = files.part_of(f, layout.name, runs, dtype)
    elif mxfp4.is_packed(layout.name):
        part = mxfp4.part_of(f, scales.file, layout.name, runs, dtype)
    else:
        part = _scaled(files.part_of(f, layout.name, runs, torch.float32), layout.name, runs, scales).to(dtype)
    theirs = [n for group in layout.groups for n in group]
    local = {n: size[n] if held[n] is None else len(held[n]) for n in theirs}  # type: ignore[arg-type]
    return part.view([local[n] for n in theirs]).permute([theirs.index(n) for n in param.names]).contiguous()


def _scaled(part: torch.Tensor, name: str, runs: list[list[tuple[int, int]]], scales: Scales) -> torch.Tensor:
    """Part of a matrix, of the ranges `runs` of rows and columns, times the scales of its blocks."""
    of_block = scales.file.get_tensor(name + SCALES).to(part.dtype)
    for dim, (ranges, size) in enumerate(zip(runs, scales.block, strict=True)):
        places = torch.cat([torch.arange(a, b) for a, b in ranges])
        of_block = of_block.index_select(dim, places // size)
    return part.mul_(of_block)


def _read_with_new_rows(source: Source, sh: Sharding, dtype: torch.dtype, saved: int, noise: Key) -> torch.Tensor:
    """This rank's shard of a table [vocab embed] of more rows than the `saved` ones in the file (see `load_hf`)."""
    param = source.param
    stored = sh.stored_index(param) or [None] * len(param.shape)
    index = [torch.arange(n) if i is None else i.cpu() for i, n in zip(stored, param.shape, strict=True)]
    held, at = dict(zip(param.names, index, strict=True)), param.names.index("vocab")
    old = source._replace(param=_with_vocab(param, saved))

    def rows(which: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return _read_part(old, {**held, "vocab": which}, dtype)

    total = squares = torch.zeros(())
    for start in range(0, saved, ROWS):
        some = rows(torch.arange(start, min(start + ROWS, saved)), torch.float64)
        total, squares = total + some.sum(at, keepdim=True), squares + some.square().sum(at, keepdim=True)
    mean = total / saved
    spread = (squares / saved - mean.square()).clamp(min=0).sqrt()
    new_ids = held["vocab"][held["vocab"] >= saved]
    index[at] = new_ids
    fresh = normal(noise, param.shape, index=tuple(index), dtype=torch.float64)
    fresh = (mean + NEW_ROW_NOISE * spread * fresh).to(dtype)
    kept = held["vocab"][held["vocab"] < saved]
    return torch.cat([rows(kept, dtype), fresh], at) if len(kept) else fresh


def _runs(
    group: list[str], size: Mapping[str, int], positions: Mapping[str, torch.Tensor | None]
) -> list[tuple[int, int]]:
    """The ranges (start, stop) that the held positions of our dims make in one Hugging Face dim, row-major."""
    if all(positions[n] is None for n in group):
        return [(0, math.prod(size[n] for n in group))]
    flat = torch.zeros(1, dtype=torch.int64)
    for n in group:
        held = positions[n]
        mine = torch.arange(size[n]) if held is None else held.cpu()
        flat = (flat[:, None] * size[n] + mine).reshape(-1)
    ends = (flat[1:] != flat[:-1] + 1).nonzero().reshape(-1).tolist()
    edges = [0, *(e + 1 for e in ends), len(flat)]
    return [(int(flat[a]), int(flat[b - 1]) + 1) for a, b in zip(edges, edges[1:], strict=False)]


# Saving


def save_hf(
    folder: str | os.PathLike[str],
    model: Any,
    params: Any,
    *,
    dtype: torch.dtype | str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    max_shard_bytes: float = 5e9,
    overwrite: bool = False,
) -> None:
    """Write a folder that transformers loads: config.json, generation_config.json, safetensors, tokenizer files.

    model: a model of a family here; params: plain tensors or DTensors, of which every rank must call this. They are
        gathered leaf by leaf and rank 0 writes: no rank ever holds more than one whole parameter.
    dtype: of the file; None means as the parameters are.
    tokenizer: a folder of tokenizer files, or one tokenizer.json, to copy; the ids of special tokens come from it too.
    max_shard_bytes: the size beyond which the weights go to several files with an index.
    overwrite: replace these files in a folder that something else made; other files in it stay. A folder that holds
        nothing but an earlier export is replaced without asking.

    Prediction modules are written where the family's files have a place for them, else left out: the model is the same without.

    All of it appears at once, by a rename. Raises UserError, on all ranks and with nothing written, for a folder
    that is in use or not writable, parameters that are not the model's, and a tokenizer that is larger than the
    vocabulary.
    """
    folder = Path(os.path.abspath(folder))
    fields = fields_of(model)
    leaves = tree.named(params)
    together(lambda: _check_params(params_of(model.spec()), leaves))
    model = _exported(model)
    spec, layout, stacks = _apart(model)
    origins = _origins(spec, stacks, model)
    wanted = None if dtype is None else dtype_of(dtype)
    paths: dict[str, list[str]] = {}  # of our parameters in each of their tensors, in order
    for p, t in sorted(layout.items(), key=lambda item: item[1].start):
        paths.setdefault(t.name, []).append(p)
    paths |= {name: [p] for name, p in _copies(model).items()}
    names = dict.fromkeys([*(t.name for t in layout.values()), *_copies(model)])
    first = {name: paths[name][0] for name in names}
    entries = [
        files.Entry(n, layout[p].shape(spec[p]), (None if spec[p].dtype else wanted) or leaves[origins[p].leaf].dtype)
        for n, p in first.items()
    ]
    shards = files.shards(entries, max_shard_bytes)
    temporary = folder.with_name(f".tmp-{folder.name}")
    fields = {**fields, "torch_dtype": dtype_name(entries[0].dtype)}
    on_first(lambda: _begin(folder, temporary, fields, tokenizer, overwrite))
    failure: Exception | None = None
    whole: dict[str, torch.Tensor] = {}  # gathered leaves

    def tensor(entry: files.Entry) -> torch.Tensor:
        held = paths[entry.name]
        mine = [_theirs(origins[p].of(whole[origins[p].leaf]).to(entry.dtype), spec[p], layout[p]) for p in held]
        return torch.cat(mine, layout[held[0]].dim)

    for name, group in shards.items():
        file: BinaryIO | None = None
        for i, entry in enumerate(group):
            needed = dict.fromkeys(origins[p].leaf for p in paths[entry.name])
            whole = {n: x for n, x in whole.items() if n in needed}  # of a fused leaf, several tensors in turn are made
            whole |= {n: _whole(leaves[n]) for n in needed if n not in whole}
            # rank 0 goes on gathering after a failure, for the others' sake
            if is_first() and failure is None:
                try:
                    if file is None:
                        file = open(temporary / name, "wb")  # noqa: SIM115
                        files.write_header(file, group, MADE_BY)
                    files.write_tensor(file, tensor(entry))
                    if i == len(group) - 1:
                        files.finish(file)
                except OSError as e:
                    failure = e
    whole.clear()

    def publish() -> None:
        try:
            if failure is not None:
                raise failure
            if len(shards) > 1:
                _write(temporary / files.INDEX, files.index_of(shards))
            _replace(folder, temporary)
        except OSError as e:
            shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(f"cannot write {folder}: {e.strerror or e}; free space or choose another folder") from None

    on_first(publish)


def fields_of(model: Any) -> dict[str, Any]:
    """The fields of config.json that describe a model. Raises UserError when its family cannot express it."""
    family, config = family_of(model), _exported(model).config
    fields = family.config_to_hf(config)
    back = family.config_from_hf(fields)
    differ = [
        f.name
        for f in dataclasses.fields(config)
        if f.name not in ("dropout", "mtp_weight", *FUSED)
        and not _alike(getattr(back, f.name), getattr(config, f.name))
    ]
    if differ:
        raise UserError(
            f"{differ[0]}={getattr(config, differ[0])!r} cannot be written: a config.json of {config.family} means "
            f"{getattr(back, differ[0])!r}; make the model with the family= that has it"
        )
    return fields


def _exported(model: Any) -> Any:
    """The model that a folder can hold: without prediction modules where the family's files have no place for them."""
    return (
        model if not getattr(model.config, "mtp", 0) or hasattr(family_of(model), "copies") else _with_modules(model, 0)
    )


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, MoE) and isinstance(b, MoE):
        return _without_training(a) == _without_training(b)
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-12))


def _without_training(moe: MoE) -> dict[str, Any]:
    """The fields of experts but those of their routing that act in training, which no config.json holds. A softmax over the
    chosen and one over all, normalised, are the same."""
    fields, r = dataclasses.asdict(moe), moe.routing
    if r.scores == "softmax" and r.groups == 1 and not r.expert_bias and (r.normalised or not r.before):
        fields["routing"] |= {"before": True, "normalised": True}
    return {**fields, "routing": {n: v for n, v in fields["routing"].items() if n not in ROUTING_OF_TRAINING}}


def _check_params(spec: Mapping[str, Param], leaves: Mapping[str, Any]) -> None:
    problems = {
        "missing": [n for n in spec if not isinstance(leaves.get(n), torch.Tensor)],
        "unknown": [n for n in leaves if n not in spec],
        "of another shape": [
            f"{n} ({list(leaves[n].shape)}, not {list(spec[n].shape)})"
            for n in spec
            if isinstance(leaves.get(n), torch.Tensor) and tuple(leaves[n].shape) != spec[n].shape
        ],
        "of an unsupported dtype": [
            f"{n} ({leaves[n].dtype})"
            for n in spec
            if isinstance(leaves.get(n), torch.Tensor) and leaves[n].dtype not in files.CODES
        ],
    }
    if any(problems.values()):
        raise UserError(f"params are not those of this model: {_listed(problems)}")


class Origin(NamedTuple):
    """The leaf that holds a matrix, and where in it if it is a fused one, or one of several: (dim, index) each."""

    leaf: str
    part: Part | None = None
    dim: int = 0
    at: tuple[tuple[int, int], ...] = ()

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        for dim, index in sorted(self.at, reverse=True):
            whole = whole.select(dim, index)
        return whole if self.part is None else self.part.of(whole, self.dim)


def _origins(apart: Mapping[str, Param], stacks: Mapping[str, Slices], model: Any) -> dict[str, Origin]:
    params, places = params_of(model.spec()), part_of(model.config)
    found: dict[str, Origin] = {}
    for leaf, slices in stacks.items():
        dims = [params[leaf].names.index(n) for n in slices.dims]
        found |= {name: Origin(leaf, at=tuple(zip(dims, at, strict=True))) for at, name in slices.paths.items()}
    for path in apart:
        if path in found:
            continue
        if path in params:
            found[path] = Origin(path)
        else:
            part = places[path.rpartition(".")[2]]
            leaf = _sibling(path, part.leaf)
            found[path] = Origin(leaf, part, params[leaf].names.index(part.dim))
    return found


def _whole(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x


def _theirs(x: torch.Tensor, param: Param, layout: HFTensor) -> torch.Tensor:
    """A parameter of ours in Hugging Face's layout."""
    theirs = [n for group in layout.groups for n in group]
    return x.permute([param.names.index(n) for n in theirs]).reshape(layout.part_shape(param))


def _begin(folder: Path, temporary: Path, fields: dict[str, Any], tokenizer: Any, overwrite: bool) -> None:
    """Check where to, and write everything but the weights into a temporary folder beside."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give the name of a folder")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite and not _is_ours(folder):
        raise UserError(f"{folder} is not empty and no earlier export: choose another folder, or overwrite=True")
    source = None if tokenizer is None else Path(tokenizer)
    loaded = None
    if source is not None and not source.exists():
        raise UserError(f"tokenizer {str(source)!r} does not exist: give a folder of tokenizer files or tokenizer.json")
    if source is not None and (source.is_file() or (source / "tokenizer.json").is_file()):
        loaded = load_tokenizer(source)
        if loaded.vocab_size > fields["vocab_size"]:
            raise UserError(
                f"tokenizer {str(source)!r} has {loaded.vocab_size} tokens, the model a vocabulary of "
                f"{fields['vocab_size']}: they do not belong together"
            )
    ids = dict.fromkeys(TOKEN_IDS)
    if loaded is not None:
        ids["eos_token_id"] = loaded.eod
    if source is not None and (source / "config.json").is_file():
        theirs = read_config(source)
        ids |= {n: theirs[n] for n in TOKEN_IDS if n in theirs}
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write(temporary / "config.json", json.dumps({**fields, **ids}, indent=2) + "\n")
        generation = {"_from_model_config": True, **{n: v for n, v in ids.items() if v is not None}}
        _write(temporary / GENERATION, json.dumps(generation, indent=2) + "\n")
        if source is not None and source.is_dir():
            for name in (*TOKENIZER_FILES, GENERATION):
                if (source / name).is_file():
                    shutil.copyfile(source / name, temporary / name)
        elif loaded is not None:
            save_tokenizer(loaded, temporary)
    except OSError as e:
        raise UserError(f"cannot write to {folder.parent}: {e.strerror or e}; choose another folder") from None


def _known(name: str) -> bool:
    """Is it the name of a file that save_hf writes?"""
    single = name in ("config.json", GENERATION, files.INDEX, files.SINGLE, *TOKENIZER_FILES)
    return single or re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name) is not None


def _is_ours(folder: Path) -> bool:
    """Does a folder hold an export of ours and nothing else?"""
    names = [p.name for p in folder.iterdir()]
    weights = [folder / n for n in names if n.endswith(".safetensors")]
    if not weights or not all(_known(n) for n in names):
        return False
    try:
        for file in weights:
            with files.opened(file) as f:
                if (f.metadata() or {}).get("made_by") != MADE_BY["made_by"]:
                    return False
    except UserError:
        return False
    return True


def _replace(folder: Path, temporary: Path) -> None:
    """Give a finished temporary folder its name. Files in the old one that save_hf does not write move into the new."""
    old = folder.with_name(f".old-{folder.name}")
    if folder.exists():
        _empty(old, folder)  # a save that was killed may have left it
        os.rename(folder, old)
    os.rename(temporary, folder)
    _empty(old, folder)


def _empty(old: Path, folder: Path) -> None:
    if old.exists():
        for entry in old.iterdir():
            if not _known(entry.name):
                os.rename(entry, folder / entry.name)
        shutil.rmtree(old)


def _write(path: Path, text: str) -> None:
    with open(path, "wb") as file:
        file.write(text.encode())
        files.finish(file)
