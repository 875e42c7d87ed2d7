"""Models from and to folders of Hugging Face transformers: config.json, safetensors, tokenizer files.

    model, params = load_hf("folder", sh=sh)
    save_hf("other", model, params, tokenizer="folder")

A family is a module beside this one with `config_from_hf(fields) -> config`, `config_to_hf(config) -> fields`,
`hf_map(config) -> {our dotted name: HFTensor}` and a model class that is made from a config.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.tensor import DTensor

from fmegatron import tree
from fmegatron.checkpoint.ranks import is_first, on_first, together
from fmegatron.data.tokenizer import load_tokenizer, save_tokenizer
from fmegatron.errors import UserError
from fmegatron.models import safetensors_files as files
from fmegatron.precision import dtype_name, dtype_of
from fmegatron.sharding import Sharding
from fmegatron.spec import Param, params_of

# config.json's model_type: (module, the model's class)
FAMILIES = {"llama": ("fmegatron.models.llama", "Llama")}

# Constant tables that old versions of transformers saved beside the parameters.
NOT_PARAMETERS = ("rotary_emb.inv_freq",)

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
# In the header of every file that save_hf writes: how it knows a folder of its own.
MADE_BY = {"format": "pt", "made_by": "fmegatron"}
SHOWN = 8  # names listed in an error


@dataclasses.dataclass(frozen=True)
class HFTensor:
    """A Hugging Face tensor: its name, and how it lays out our dims, "(kv group head) embed" (brackets: one of its
    dims)."""

    name: str
    dims: str

    @property
    def groups(self) -> list[list[str]]:
        """Per dim of the Hugging Face tensor, our dims in it."""
        return [(inside or single).split() for inside, single in re.findall(r"\(([^)]*)\)|(\S+)", self.dims)]

    def shape(self, param: Param) -> tuple[int, ...]:
        """The Hugging Face tensor's shape for a parameter of ours."""
        size = dict(zip(param.names, param.shape, strict=True))
        return tuple(math.prod(size[n] for n in group) for group in self.groups)


# Loading


def load_hf(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    sh: Sharding | None = None,
    device: torch.device | str | None = None,
    **overrides: Any,
) -> tuple[Any, Any]:
    """(model, params) of a folder that transformers wrote. Each rank reads and allocates its own shards only.

    dtype: of the parameters; None means that of sh.precision, which is float32 by default.
    sh: where parameters lie; the leaves are then DTensors at rest. None means plain tensors.
    device: where to; None means sh's, which is the CPU by default.
    overrides: fields of the family's config or of its model that replace those of config.json (dropout=0.1).

    Raises UserError, before anything is allocated, for an absent or damaged file, a family or a field that is not
    supported, and for tensors that are missing, extra, or of another shape, naming them.
    """
    folder = Path(folder)
    sh = sh or Sharding()
    model, family = _model(folder, overrides)
    spec = model.spec()
    sh.check_spec(spec)
    params, layout = params_of(spec), family.hf_map(model.config)
    found = files.tensors_of(folder)
    _check(folder, found, params, layout, tied=getattr(model.config, "tied", False))
    leaves: dict[str, torch.Tensor] = {}
    for file in sorted({found[layout[path].name].file for path in params}):
        with files.opened(file) as f:
            for path, param in params.items():
                if found[layout[path].name].file == file:
                    wanted = param.dtype or (sh.precision.params if dtype is None else dtype_of(dtype))
                    part = _read(f, param, layout[path], sh, wanted)
                    leaves[path] = sh.at_rest(part.to(device if device is not None else sh.device), param)
    return model, tree.like(spec, [leaves[path] for path in params])


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


def _model(folder: Path, overrides: Mapping[str, Any]) -> tuple[Any, Any]:
    """(model, family module) that config.json describes."""
    fields = read_config(folder)
    kind = fields.get("model_type")
    if kind not in FAMILIES:
        raise UserError(f"{folder / 'config.json'}: model_type {kind!r} is not supported: only {', '.join(FAMILIES)}")
    if fields.get("quantization_config"):
        raise UserError(f"{folder / 'config.json'}: quantization_config: quantized weights are not supported")
    module, name = FAMILIES[kind]
    family = importlib.import_module(module)
    model_class = getattr(family, name)
    try:
        config = family.config_from_hf(fields)
    except KeyError as e:
        raise UserError(f"{folder / 'config.json'} has no field {e.args[0]!r}") from None
    of_config = {f.name for f in dataclasses.fields(config)}
    of_model = {f.name for f in dataclasses.fields(model_class) if f.init} - {"config"}
    if unknown := [n for n in overrides if n not in of_config | of_model]:
        raise UserError(
            f"load_hf: {unknown[0]!r} is no field of {kind}: it has {', '.join(sorted(of_config | of_model))}"
        )
    config = dataclasses.replace(config, **{n: v for n, v in overrides.items() if n in of_config})
    return model_class(config, **{n: v for n, v in overrides.items() if n in of_model}), family


def _check(
    folder: Path,
    found: Mapping[str, files.Found],
    params: Mapping[str, Param],
    layout: Mapping[str, HFTensor],
    tied: bool,
) -> None:
    if params.keys() != layout.keys():
        raise RuntimeError(f"hf_map and spec differ: {sorted(params.keys() ^ layout.keys())[:SHOWN]}")
    expected = {layout[path].name: layout[path].shape(param) for path, param in params.items()}
    ignored = [n for n in found if n.endswith(NOT_PARAMETERS) or tied and n == "lm_head.weight"]
    both = [n for n in expected if n in found]
    problems = {
        "missing": [n for n in expected if n not in found],
        "unknown": [n for n in found if n not in expected and n not in ignored],
        "of another shape": [
            f"{n} ({list(found[n].shape)} in the file, {list(expected[n])} by config.json)"
            for n in both
            if found[n].shape != expected[n]
        ],
        "of an unsupported dtype": [f"{n} ({found[n].code})" for n in both if found[n].code not in files.DTYPES],
    }
    if any(problems.values()):
        raise UserError(f"the tensors in {folder} do not fit its config.json: {_listed(problems)}")


def _listed(problems: Mapping[str, list[str]]) -> str:
    texts = []
    for what, names in problems.items():
        if names:
            more = f", … and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            texts.append(f"{len(names)} {what}: {', '.join(names[:SHOWN])}{more}")
    return "; ".join(texts)


def _read(f: Any, param: Param, layout: HFTensor, sh: Sharding, dtype: torch.dtype) -> torch.Tensor:
    """This rank's shard of a parameter from an open file."""
    positions = dict(zip(param.names, sh.stored_index(param) or [None] * len(param.shape), strict=True))
    size = dict(zip(param.names, param.shape, strict=True))
    part = files.part_of(f, layout.name, [_runs(group, size, positions) for group in layout.groups], dtype)
    theirs = [n for group in layout.groups for n in group]
    local = dict(zip(param.names, sh.stored_shape(param), strict=True))
    return part.view([local[n] for n in theirs]).permute([theirs.index(n) for n in param.names]).contiguous()


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

    All of it appears at once, by a rename. Raises UserError, on all ranks and with nothing written, for a folder
    that is in use or not writable, parameters that are not the model's, and a tokenizer that is larger than the
    vocabulary.
    """
    folder = Path(os.path.abspath(folder))
    family = sys.modules[type(model).__module__]
    if not hasattr(family, "hf_map"):
        raise UserError(
            f"{type(model).__name__} has no Hugging Face layout: only {', '.join(FAMILIES)} can be saved so"
        )
    spec = params_of(model.spec())
    leaves = tree.named(params)
    layout = family.hf_map(model.config)
    together(lambda: _check_params(spec, leaves))
    wanted = None if dtype is None else dtype_of(dtype)
    entries = [files.Entry(t.name, t.shape(spec[p]), wanted or leaves[p].dtype) for p, t in layout.items()]
    path_of = {t.name: p for p, t in layout.items()}
    shards = files.shards(entries, max_shard_bytes)
    temporary = folder.with_name(f".tmp-{folder.name}")
    fields = {**family.config_to_hf(model.config), "torch_dtype": dtype_name(entries[0].dtype)}
    on_first(lambda: _begin(folder, temporary, fields, tokenizer, overwrite))
    failure: Exception | None = None
    for name, group in shards.items():
        file: BinaryIO | None = None
        for i, entry in enumerate(group):
            whole = _whole(leaves[path_of[entry.name]])
            # rank 0 goes on gathering after a failure, for the others' sake
            if is_first() and failure is None:
                try:
                    if file is None:
                        file = open(temporary / name, "wb")  # noqa: SIM115
                        files.write_header(file, group, MADE_BY)
                    param, theirs = spec[path_of[entry.name]], layout[path_of[entry.name]]
                    files.write_tensor(file, _theirs(whole.to(entry.dtype), param, theirs))
                    if i == len(group) - 1:
                        files.finish(file)
                except OSError as e:
                    failure = e
            del whole

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


def _whole(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x


def _theirs(x: torch.Tensor, param: Param, layout: HFTensor) -> torch.Tensor:
    """A parameter of ours in Hugging Face's layout."""
    theirs = [n for group in layout.groups for n in group]
    return x.permute([param.names.index(n) for n in theirs]).reshape(layout.shape(param))


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
