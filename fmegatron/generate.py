"""Text from a model: a cache of keys and values, drawing with temperature, top-k and top-p."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmegatron import checkpoint, random, tree
from fmegatron.axes import PIPELINE, parse_axes
from fmegatron.checkpoint.ranks import is_first
from fmegatron.config import GenerateConfig
from fmegatron.context import PADDING, Ctx
from fmegatron.data import load_tokenizer
from fmegatron.drawing import draw
from fmegatron.errors import UserError
from fmegatron.launch import close_distributed, init_distributed
from fmegatron.mesh import make_mesh
from fmegatron.models import Decoder, config_from_dict, load_hf
from fmegatron.models import safetensors_files as files
from fmegatron.models.hf import model_of
from fmegatron.parallel.pipeline import Pipeline, inside_stage, pipeline
from fmegatron.parallel.schedules import make_schedule
from fmegatron.parallel.stages import parse_layout
from fmegatron.precision import Precision, dtype_of
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.spec import abstract
from fmegatron.speculate import Guesses, check_speculation, speculated

AVERAGES = "opt.ema.ema"  # where a checkpoint's state has the moving average of the weights


@torch.no_grad()
def generate_tokens(
    model: Any,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eod: int | None = None,
    sh: Sharding | None = None,
    on_token: Callable[[list[int | None]], None] | None = None,
    guesses: Guesses | None = None,
) -> list[list[int]]:
    """New token ids for each prompt, at most `tokens`, up to and without `eod`.

    model: with `cache` and `cached`; a `Pipeline` of one has them too, whose ranks must all call this alike.
    prompts: token ids, of unequal length at will (the shorter ones are padded on the left; the padding is never seen).
    temperature: divides the logits; 0 takes the likeliest token. top_k, top_p: draw among the likeliest only.
    seed: the draws of row r, step t are a function of (seed, r, t).
    on_token: called after each step with each row's new id, None for rows that have ended.
    guesses: the model's prediction module guesses a token ahead (see `fmegatron.speculate`), and is counted here. At temperature
        0 tokens are the same, else they are other draws of the same distribution.

    The prompts are read in one pass; each step then reads one token a row. Raises UserError for an empty prompt or
    meaningless numbers.
    """
    _check(prompts, tokens, temperature, top_k, top_p)
    if guesses is not None:
        check_speculation(model)
    sh = sh or Sharding()
    held = _tensors(params)
    device = held[0].device if held else model.mesh.device  # of a pipeline's rank that holds nothing
    longest = max(map(len, prompts))
    if (room := most_tokens(model, longest)) < tokens:
        if not room:
            raise UserError(f"a prompt of {longest} tokens is longer than the model's learned positions: shorten it")
        raise UserError(
            f"--tokens {tokens} behind a prompt of {longest} tokens are more than the model's learned positions have room "
            f"for: use at most {room}"
        )
    padding = torch.tensor([longest - len(p) for p in prompts], device=device)
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], dtype=torch.int64, device=device)
    slots = longest + tokens
    own: dict[str, Any] = {"sh": sh} if isinstance(model, Pipeline) else {}
    own |= {} if guesses is None else {"modules": 1}
    cache = model.cache(len(prompts), slots, dtype=sh.precision.compute_dtype, device=device, **own)
    place = torch.arange(slots, device=device)
    positions = (place - padding[:, None]).clamp(min=0)
    padded = len({len(p) for p in prompts}) > 1
    segments = torch.where(place < padding[:, None], PADDING, 0) if padded else None
    key = random.key(seed)
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    out: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)

    def inputs(start: int, end: int) -> dict[str, Any]:
        more = {} if segments is None else {"segments": segments[:, :end]}
        return {"ctx": Ctx(sh=sh), "positions": positions[:, start:end], **more}

    def emit(new: Tensor) -> bool:
        """Takes each row's next token. Have all rows ended?"""
        fresh: list[int | None] = []
        for row, token in enumerate(new.tolist()):
            ended[row] = ended[row] or token == eod
            fresh.append(None if ended[row] else token)
            if not ended[row]:
                out[row].append(token)
        if on_token is not None:
            on_token(fresh)
        return all(ended)

    if guesses is not None:
        where: dict[str, Any] = {"cache": cache, "inputs": inputs, "emit": emit, "ended": ended, "guesses": guesses}
        speculated(model, params, ids, tokens=tokens, key=key, **where, **options)
        return out
    start = 0
    for step in range(tokens):
        end = start + ids.shape[1]
        logits = model.cached(params, ids, cache, start, **inputs(start, end))
        new = draw(logits, random.fold_in(key, step), **options)
        if emit(new):
            break
        ids, start = new[:, None], end
    return out


def most_tokens(model: Any, prompt: int) -> int:
    """How many tokens a model can write behind a prompt of so many: with learned positions as many as it has left, and
    one that is not read itself."""
    config = getattr(model, "config", None)
    if getattr(config, "positions", None) != "learned":
        return 1 << 62
    return max(0, config.max_seq - prompt + 1)  # type: ignore[union-attr]


def generate(model: Any, params: Any, tokenizer: Any, prompts: Sequence[str], **options: Any) -> list[str]:
    """The texts that continue some prompts. Options as for `generate_tokens`; ends at the tokenizer's
    end-of-document token."""
    options.setdefault("temperature", 0.8)
    options.setdefault("eod", tokenizer.eod)
    ids = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    found = generate_tokens(model, params, ids, **options)
    return [continuation(tokenizer, prompt, new) for prompt, new in zip(ids, found, strict=True)]


def continuation(tokenizer: Any, prompt: Sequence[int], new: Sequence[int]) -> str:
    """The text of new tokens behind a prompt's: some tokenizers write the first token of a text without its space."""
    return tokenizer.decode([*prompt, *new])[len(tokenizer.decode(list(prompt))) :]


def prompt_ids(tokenizer: Any, prompt: str, *, special: bool = False) -> list[int]:
    """The ids of a prompt; an empty one is the end of the document before.

    special: with what the tokenizer puts around a text, such as a first token that a pretrained model expects; the
    texts of `fmegatron train` have none.
    """
    ids = tokenizer.encode(prompt, add_special_tokens=special)
    if not ids and tokenizer.eod is None:
        raise UserError(
            "--prompt is empty and the tokenizer has no end-of-document token to start from: give some text"
        )
    return ids or [tokenizer.eod]


def model_of_run(path: str) -> Decoder:
    """The model of a run folder, one checkpoint, or a folder of Hugging Face transformers. Raises UserError for a path
    that is none of these."""
    if is_hf_folder(path):
        return model_of(path)
    return Decoder(config_from_dict(checkpoint.read_meta(path)["model"]))


def saved_format(path: str) -> torch.dtype:
    """The dtype of the parameters in a run folder, one checkpoint, or a folder of Hugging Face transformers."""
    if not is_hf_folder(path):
        return checkpoint.saved_dtype(path, "params.embed")
    first = next(iter(files.tensors_of(Path(path)).values()), None)
    return torch.float32 if first is None else files.DTYPES.get(first.code, torch.float32)


def load_run(
    path: str,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    weights: str = "params",
    held: Callable[[Any], Any] | None = None,
    sh: Sharding | None = None,
) -> tuple[Decoder, Any, Any, Path]:
    """(model, parameters on one device, or as `sh` lays them out, tokenizer, folder of the weights) of a run folder, one checkpoint, or a folder
    of Hugging Face transformers.

    weights: "params", or "ema": the moving average that a run with --optim.ema keeps.
    dtype: None: as saved.
    held: of a tree like the model's parameters what this rank of a pipeline holds (`Pipeline.held`): no more is read.
    Raises UserError for a path that is none of these, and averages that are not there.
    """
    if is_hf_folder(path):
        if weights != "params":
            raise UserError(f"--weights {weights}: {path} is a Hugging Face folder, which holds one set of weights")
        model, params = load_hf(path, dtype=dtype or saved_format(path), device=device, held=held, sh=sh)
        return model, params, load_tokenizer(path), Path(path)
    folder = checkpoint.resolve(path)
    model = model_of_run(str(folder))
    saved = saved_format(str(folder))
    load = load_averages if weights == "ema" else load_params
    params = load(folder, model, device, held, sh)
    params = tree.tree_map(lambda t: t.to(dtype or saved), params)
    return model, params, load_tokenizer(tokenizer_of(folder)), folder


def is_hf_folder(path: str | Path) -> bool:
    """Is it a folder that transformers wrote, or `export`?"""
    return (Path(path) / "config.json").is_file()


def tokenizer_of(folder: Path) -> Path:
    """The tokenizer's folder that belongs to a folder of weights, as `load_run` gives it."""
    if is_hf_folder(folder):
        return folder
    return folder.parent.parent / checkpoint.read_meta(folder)["tokenizer"]


def load_params(
    folder: Path,
    model: Decoder,
    device: torch.device,
    held: Callable[[Any], Any] | None = None,
    sh: Sharding | None = None,
) -> Any:
    """The parameters of a checkpoint, whole or what this rank holds, in the dtype in which they were saved."""
    saved = checkpoint.saved_dtype(folder, "params.embed")
    return checkpoint.load_part(folder, "params", _abstract(model, saved, held, sh), device=device)


def load_averages(
    folder: Path,
    model: Decoder,
    device: torch.device,
    held: Callable[[Any], Any] | None = None,
    sh: Sharding | None = None,
) -> Any:
    """The averaged weights of a checkpoint of a run with --optim.ema."""
    if f"{AVERAGES}.embed" not in checkpoint.info(folder).tensors:
        raise UserError(
            f"--weights ema: {folder} has no averaged weights: leave --weights out, or train with --optim.ema 0.999"
        )
    like: Any = _abstract(model, checkpoint.saved_dtype(folder, f"{AVERAGES}.embed"), held, sh)
    for name in reversed(AVERAGES.split(".")):
        like = {name: like}
    state = checkpoint.load(folder, like, strict=False, device=device)
    for name in AVERAGES.split("."):
        state = state[name]
    return state


def _abstract(model: Decoder, dtype: torch.dtype, held: Callable[[Any], Any] | None, sh: Sharding | None = None) -> Any:
    spec = model.spec() if held is None else held(model.spec())
    return abstract(spec, sh=dataclasses.replace(sh or Sharding(), precision=Precision(params=dtype)))


def over_stages(
    config: GenerateConfig, model: Decoder, device: torch.device, precision: Precision
) -> tuple[Pipeline, Sharding]:
    """The ranks of --mesh as a pipeline of the model, and the sharding of a stage. Raises UserError for stages that do
    not fit."""
    ranks = config.ranks()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != ranks:
        raise UserError(f"--mesh {config.mesh} is of {ranks} processes, but there are {world}: start as many")
    sizes = model.config
    stages = None if config.stages is None else parse_layout(config.stages, layers=sizes.layers, mtp=sizes.mtp)
    axes = config.mesh or ""
    text = axes if PIPELINE in parse_axes(axes, argument="--mesh") else f"{PIPELINE}=1,{axes}"
    mesh = make_mesh(text, device=device.type, kv_heads=sizes.kv_heads)
    schedule = make_schedule("gpipe", mesh.sizes[PIPELINE], 1)
    pipe = pipeline(model, schedule, mesh=mesh, axis=PIPELINE, assignment=stages)
    rules = standard_rules(mesh, uneven={"vocab": sizes.vocab, "mlp": sizes.mlp})
    return pipe, inside_stage(Sharding(mesh, rules, precision=precision), model.spec(), PIPELINE)


def run(config: GenerateConfig) -> int:
    """`fmegatron generate`."""
    _check([[0]], config.tokens, config.temperature, config.top_k, config.top_p)
    device = init_distributed(config.device)
    try:
        return run_here(config, device)
    finally:
        close_distributed()


def run_here(config: GenerateConfig, device: torch.device) -> int:
    """`run` on the ranks of a process group that exists already, or on one process. The first rank prints."""
    dtype = saved_format(config.checkpoint) if config.dtype is None else dtype_of(config.dtype)
    pipe, sh = None, Sharding(precision=Precision(params=dtype))
    if config.mesh is not None:
        pipe, sh = over_stages(config, model_of_run(config.checkpoint), device, sh.precision)
    held = None if pipe is None else pipe.held
    whole, params, tokenizer, _ = load_run(
        config.checkpoint, device=device, dtype=dtype, weights=config.weights, held=held, sh=sh
    )
    model: Any = whole if pipe is None else pipe
    guesses = Guesses() if config.speculate else None
    special = is_hf_folder(config.checkpoint)  # as transformers does
    prompts = [prompt_ids(tokenizer, p, special=special) for p in config.prompt]
    options: dict[str, Any] = {
        "tokens": config.tokens,
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "seed": config.seed,
        "eod": tokenizer.eod,
        "sh": sh,
        "guesses": guesses,
    }
    prints = is_first()
    if config.stream and len(prompts) == 1 and prints:
        print(config.prompt[0], end="", flush=True)
        printer = Printer(tokenizer, prompts[0])
        generate_tokens(model, params, prompts, on_token=printer, **options)
        printer.finish()
        _tell(guesses)
        return 0
    found = generate_tokens(model, params, prompts, **options)
    for text, prompt, new in zip(config.prompt, prompts, found, strict=True) if prints else ():
        if len(prompts) > 1:
            print("-" * 20)
        print(text + continuation(tokenizer, prompt, new))
    _tell(guesses)
    return 0


def _tell(guesses: Guesses | None) -> None:
    if guesses is not None:
        print(guesses, file=sys.stderr)


class Printer:
    """Prints a text as its tokens come, holding back bytes that do not make a character yet.

    Only the tokens since the last but one print are decoded, so that a long text costs no more a token than a short
    one.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self.tokenizer, self.ids = tokenizer, list(prompt)
        self.context, self.shown = 0, len(prompt)  # decoding begins at the first; the text before the second is printed

    def __call__(self, new: list[int | None]) -> None:
        if new[0] is not None:
            self.ids.append(new[0])
            self._print(self._unseen())

    def finish(self) -> None:
        self._print(self._unseen(), end=True)
        print()

    def _unseen(self) -> str:
        before = self.tokenizer.decode(self.ids[self.context : self.shown])
        return self.tokenizer.decode(self.ids[self.context :])[len(before) :]

    def _print(self, text: str, *, end: bool = False) -> None:
        if text and (end or not text.endswith("\ufffd")):
            print(text, end="", flush=True)
            self.context, self.shown = self.shown, len(self.ids)


def _tensors(params: Any) -> list[Tensor]:
    return tree.tensors(params)[0]


def _check(
    prompts: Sequence[Sequence[int]], tokens: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    if not prompts or any(len(p) == 0 for p in prompts):
        raise UserError("a prompt has no token: give each at least one")
    if tokens < 1:
        raise UserError(f"--tokens {tokens} must be at least 1")
    if temperature < 0:
        raise UserError(f"--temperature {temperature} must be 0 (the likeliest token) or more")
    if top_k is not None and top_k < 1:
        raise UserError(f"--top-k {top_k} must be at least 1; leave it out to draw among all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"--top-p {top_p} must be above 0 and at most 1; leave it out to draw among all tokens")
