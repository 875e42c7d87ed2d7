"""Every family against transformers, on tiny random models with odd sizes: what tests/test_families.py checks.

    python -m tests.families

prints the worst error of each family in each check. A case is a config of transformers; its model is drawn at random,
saved by transformers, and loaded here from that folder, so loading is part of every check.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from fmegatron import tree
from fmegatron.accumulate import accumulate
from fmegatron.context import Ctx
from fmegatron.generate import generate_tokens
from fmegatron.mesh import make_mesh, parse_axes
from fmegatron.models import Decoder, hf, load_hf, save_hf
from fmegatron.models.decoder import IGNORE
from fmegatron.precision import Precision
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SINGLE, DOUBLE = torch.float32, torch.float64
BOUND = {SINGLE: 1e-5, DOUBLE: 1e-10}
BETWEEN_LAYOUTS = 1e-12
ROWS, SEQ, NEW_TOKENS = 4, 12, 12
PROMPTS = (4, 9)  # lengths; with the new tokens both are longer than every window below

# 3 kv heads of 2 query heads each, and a head that is not embed / heads; the vocabulary and the feed-forward part
# divide by two ranks, the kv heads do not. No special tokens: a padding row of the embedding would get no gradient.
SIZES: dict[str, Any] = dict(
    vocab_size=102,
    hidden_size=24,
    intermediate_size=36,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=10,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
GPT: dict[str, Any] = dict(
    vocab_size=102, n_embd=24, n_layer=2, n_head=6, n_positions=40, bos_token_id=None, eos_token_id=None
)
GEMMA: dict[str, Any] = dict(sliding_window=5, query_pre_attn_scalar=23, num_hidden_layers=3)


def kinds(text: str) -> dict[str, Any]:
    """layer_types of a word: w for a windowed layer, f for a full one."""
    named = {"w": "sliding_attention", "f": "full_attention"}
    return {"layer_types": [named[c] for c in text], "num_hidden_layers": len(text)}


def rope(kind: str, base: float = 500.0, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": base, **fields}}


def long_rope(original: int, pairs: int, **fields: Any) -> dict[str, Any]:
    factors = {"short_factor": [1 + 0.1 * i for i in range(pairs)], "long_factor": [2 + 0.7 * i for i in range(pairs)]}
    return {**rope("longrope", **factors, **fields), "original_max_position_embeddings": original}


@dataclass(frozen=True)
class Case:
    """family: the model_type. fields: of its config. grows: its rotary table depends on the length in use, so a cache
    holds keys that were turned by tables of different lengths, and padding changes what is computed."""

    family: str
    fields: dict[str, Any]
    grows: bool = False


def _case(family: str, grows: bool = False, **fields: Any) -> Case:
    return Case(family, {**(GPT if family == "gpt2" else SIZES), **fields}, grows)


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, beta_slow=0.5)
YARN_DEEPSEEK = rope(
    "yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.3, truncate=False
)
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
}
CASES: dict[str, Case] = {
    "gpt2": _case("gpt2", n_inner=38),
    "gpt2-untied-gelu": _case("gpt2", tie_word_embeddings=False, activation_function="gelu", layer_norm_epsilon=1e-3),
    "llama": _case("llama", **rope("default")),
    "llama-3.1-tied": _case("llama", tie_word_embeddings=True, num_key_value_heads=2, **LLAMA3),
    "llama-biases-linear": _case("llama", attention_bias=True, mlp_bias=True, **rope("linear", factor=4.0)),
    "llama-dynamic": _case("llama", True, max_position_embeddings=8, **rope("dynamic", factor=3.0)),
    "llama-yarn": _case("llama", **YARN),
    "mistral-window": _case("mistral", sliding_window=5, num_hidden_layers=3, **rope("default")),
    "mistral-yarn-gelu": _case("mistral", sliding_window=None, hidden_act="gelu", **YARN_DEEPSEEK),
    "qwen2-tied": _case("qwen2", tie_word_embeddings=True, **rope("default")),
    "qwen2-windows": _case("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1, **kinds("fww")),
    "qwen3-tied": _case("qwen3", tie_word_embeddings=True, **rope("default")),
    "qwen3-biases-windows": _case(
        "qwen3", attention_bias=True, use_sliding_window=True, sliding_window=5, **kinds("wwf") | YARN
    ),
    "gemma2": _case("gemma2", **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, **rope("default")),
    "gemma2-odd-pattern-tied": _case(
        "gemma2",
        attention_bias=True,
        tie_word_embeddings=True,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        **{**GEMMA, **kinds("wwfw")},
    ),
    "gemma3": _case("gemma3_text", **{**GEMMA, "num_hidden_layers": 7}, rope_parameters=TWO_ROPES),
    "gemma3-cap-biases-tied": _case(
        "gemma3_text",
        attention_bias=True,
        tie_word_embeddings=True,
        final_logit_softcapping=3.0,
        **{**GEMMA, **kinds("fww")},
    ),
    "phi3-partial-window": _case("phi3", sliding_window=5, head_dim=12, **rope("default", partial_rotary_factor=0.5)),
    "phi3-long": _case("phi3", head_dim=4, max_position_embeddings=12, tie_word_embeddings=True, **long_rope(3, 2)),
    "phi3-long-partial": _case(
        "phi3", head_dim=8, hidden_size=48, max_position_embeddings=12, **long_rope(3, 2, partial_rotary_factor=0.5)
    ),
    "phi3-short": _case("phi3", head_dim=4, **long_rope(32, 2)),
    "olmo2": _case("olmo2", **rope("default")),
    "olmo2-tied-biases": _case("olmo2", tie_word_embeddings=True, attention_bias=True, **rope("linear", factor=3.0)),
}
FAMILIES = tuple(dict.fromkeys(case.family for case in CASES.values()))


# ------------------------------------------------------------------------------------------------------ transformers


@contextlib.contextmanager
def wide(family: str, dtype: torch.dtype) -> Iterator[None]:
    """transformers computes norms, softmax, rotary tables and Gemma's scale in float32 whatever the model's dtype; with
    dtype float64, in float64 inside. A model must be made inside as well, for its tables are made with it."""
    if dtype != DOUBLE:
        yield
        return

    class Wide:
        float32 = float = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    kind = "gemma3" if family == "gemma3_text" else family
    modules = [
        importlib.import_module(f"transformers.models.{kind}.modeling_{kind}"),
        importlib.import_module("transformers.modeling_rope_utils"),
    ]
    plain = torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.set_default_dtype(DOUBLE)
    for module in modules:
        module.torch = Wide()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.torch = torch  # type: ignore[attr-defined]
        torch.set_default_dtype(SINGLE)
        torch.Tensor.float = plain  # type: ignore[method-assign]


@functools.cache
def _scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="families-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def folder_of(name: str) -> Path:
    """A folder with the case's model, saved by transformers. Norms and biases are drawn too: none is trivially right."""
    case = CASES[name]
    config = transformers.AutoConfig.for_model(case.family, **case.fields)
    model = transformers.AutoModelForCausalLM.from_config(config).to(SINGLE)  # also when it is made inside `wide`
    g = torch.Generator().manual_seed(list(CASES).index(name))
    scaled_by_weight = case.family not in ("gemma2", "gemma3_text")  # Gemma's norms multiply by 1 + weight
    table = "transformer.wte.weight" if case.family == "gpt2" else "model.embed_tokens.weight"
    with torch.no_grad():
        for path, p in model.named_parameters():
            norm = p.ndim == 1 and path.endswith("weight")
            # a tied model repeats its last token for ever when its table or its biases outweigh the rest
            std = 0.3 if norm else 0.1 if p.ndim == 1 else 0.25
            p.copy_((1.0 if norm and scaled_by_weight else 0.0) + std * torch.randn(p.shape, generator=g, dtype=SINGLE))
            if config.tie_word_embeddings and path == table:
                p.div_(math.sqrt(config.hidden_size) if case.family.startswith("gemma") else 1.5)
    model.save_pretrained(_scratch() / name)
    return _scratch() / name


def reference(name: str, dtype: torch.dtype, folder: Path | None = None) -> Any:
    """transformers' model of a case, loaded inside `wide`."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder or folder_of(name), dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@functools.cache
def batch_of(vocab: int, rows: int = ROWS, seq: int = SEQ, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random tokens; of the labels some are ignored, others masked, unequally many in each row."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (rows, seq + 1), generator=g)
    mask = torch.rand(rows, seq, generator=g) < torch.linspace(0.3, 0.95, rows)[:, None]
    labels = ids[:, 1:].masked_fill(torch.rand(rows, seq, generator=g) < 0.2, IGNORE)
    return {"tokens": ids[:, :-1].contiguous(), "labels": labels, "mask": mask}


# ----------------------------------------------------------------------------------------------------- the checks


def sharding(dtype: torch.dtype) -> Sharding:
    return Sharding(precision=Precision(params=dtype))


def ours(name: str, dtype: torch.dtype = DOUBLE, folder: Path | None = None) -> tuple[Decoder, Any]:
    return load_hf(folder or folder_of(name), dtype=dtype)


def gradients(model: Decoder, params: Any, batch: Any, sh: Sharding, microbatches: int = 1) -> tuple[Any, Any]:
    """(mean loss of a token that counts, the gradients)."""
    (value, _), grads = accumulate(model.loss, microbatches, weights=model.weights)(params, batch, Ctx(sh=sh))
    return value, grads


def _worst(got: Any, want: Any) -> float:
    """The largest relative error of a leaf."""
    named, scales = tree.named(want), _scales(want)
    return max(float((g - named[path]).norm() / scales[path]) for path, g in tree.named(got).items())


def _scales(grads: Any) -> dict[str, float]:
    """The norm of each leaf, by which its error is divided. A bias of keys counts with that of queries: it changes the
    softmax through rotary positions alone, so its gradient nearly cancels, and without them is zero."""
    norms = {path: float(g.norm()) for path, g in tree.named(grads).items()}
    return {path: max(n, norms[path.replace("k_bias", "q_bias")]) for path, n in norms.items()}


@functools.cache
def errors(name: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of logits, loss and gradients against transformers."""
    case, batch = CASES[name], batch_of(CASES[name].fields["vocab_size"])
    with wide(case.family, dtype):
        theirs = reference(name, dtype)
        want = theirs(batch["tokens"]).logits
        assert want.dtype == dtype
        labels = batch["labels"].flatten()
        each = torch.nn.functional.cross_entropy(want.flatten(0, 1), labels, reduction="none", ignore_index=IGNORE)
        counts = batch["mask"].flatten() & (labels != IGNORE)
        loss = (each * counts).sum() / counts.sum()
        loss.backward()
        with torch.no_grad():
            for p in theirs.parameters():
                p.copy_(p.grad)
        theirs.save_pretrained(_scratch() / f"{name}-gradients-{dtype}")
    model, params = ours(name, dtype)
    logits = model.logits(params, batch["tokens"], Ctx(sh=sharding(dtype)))
    value, grads = gradients(model, params, batch, sharding(dtype))
    _, wanted = ours(name, dtype, _scratch() / f"{name}-gradients-{dtype}")
    want, loss = want.detach(), loss.detach()
    return {
        "logits": float((logits.detach() - want).abs().max() / want.abs().max()),
        "loss": float(abs(value - loss) / abs(loss)),
        "gradients": _worst(grads, wanted),
    }


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {n: x for f in sorted(folder.glob("*.safetensors")) for n, x in load_file(f).items()}


def _difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of tensors by name; infinite where names, dtypes or shapes differ."""
    if a.keys() != b.keys() or any(a[n].dtype != b[n].dtype or a[n].shape != b[n].shape for n in a):
        return math.inf
    return max(float((a[n] - b[n]).abs().max()) for n in a)


def round_trip(name: str) -> float:
    """transformers -> here -> transformers: the largest difference of tensors and of logits; infinite where a config
    comes back different."""
    out, tokens = _scratch() / f"{name}-out", batch_of(CASES[name].fields["vocab_size"])["tokens"]
    model, params = load_hf(folder_of(name))
    save_hf(out, model, params)
    again, loaded = load_hf(out)
    family = hf.family_of(model)
    if not again.config == model.config == family.config_from_hf(family.config_to_hf(model.config)):
        return math.inf
    with torch.no_grad():
        logits = [reference(name, SINGLE, folder)(tokens).logits for folder in (folder_of(name), out)]
    return max(
        _difference(tensors_in(folder_of(name)), tensors_in(out)),
        _difference(tree.named(params), tree.named(loaded)),
        float((logits[0] - logits[1]).abs().max()),
    )


def generation(name: str) -> tuple[int, list[list[int]]]:
    """(how many greedy tokens differ from transformers' own generation, ours). Prompts of unequal length are one batch
    here, each is alone there."""
    case = CASES[name]
    ids = batch_of(case.fields["vocab_size"], rows=len(PROMPTS), seed=2)["tokens"].tolist()
    prompts = [row[:n] for row, n in zip(ids, PROMPTS, strict=True)]
    model, params = ours(name)
    groups = [[p] for p in prompts] if case.grows else [prompts]
    got = [new for g in groups for new in generate_tokens(model, params, g, tokens=NEW_TOKENS, sh=sharding(DOUBLE))]
    want = []
    for prompt in prompts:
        with wide(case.family, DOUBLE), torch.no_grad():
            theirs = reference(name, DOUBLE)
            new = theirs.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        want.append(new[0, len(prompt) :].tolist())
    assert all(len(w) == NEW_TOKENS for w in want)
    return sum(a != b for g, w in zip(got, want, strict=True) for a, b in zip(g, w, strict=True)), got


def cache_error(name: str) -> float:
    """A pass over the first tokens and then one token at a time through the cache, against all logits at once."""
    model, params = ours(name)
    tokens, ctx = batch_of(model.config.vocab)["tokens"], Ctx(sh=sharding(DOUBLE))
    want, prefix = model.logits(params, tokens, ctx), SEQ - 5
    cache, error = model.cache(ROWS, SEQ, dtype=DOUBLE), torch.zeros(())
    places = torch.arange(SEQ).expand(ROWS, SEQ)
    for start, end in [(0, prefix), *((i, i + 1) for i in range(prefix, SEQ))]:
        with torch.no_grad():
            got = model.cached(params, tokens[:, start:end], cache, start, ctx, positions=places[:, start:end])
        error = torch.maximum(error, (got - want[:, end - 1]).abs().max())
    return float(error / want.abs().max())


def layout_error(name: str, axes: str = "tp=2", *, store: tuple[str, ...] = (), packed: bool = False) -> float:
    """Relative error of loss and gradients on simulated ranks, with sequence parallelism, against one device.
    packed: each row is two documents, cut at another place than between ranks."""
    model, params = ours(name)
    batch = batch_of(model.config.vocab)
    if packed:
        first = torch.arange(SEQ) < SEQ // 2 - 1
        places = torch.arange(SEQ) - (SEQ // 2 - 1) * (~first)
        more = {"segments": (~first).long(), "positions": places}
        batch = {**batch, **{n: x.expand(ROWS, SEQ).contiguous() for n, x in more.items()}}
    value, want = gradients(model, params, batch, sharding(DOUBLE))
    with simulate(math.prod(parse_axes(axes).values())):
        mesh = make_mesh(axes, kv_heads=model.config.kv_heads, device="cpu")
        rules = standard_rules(mesh, sequence_parallel=True, store=store)
        sh = Sharding(mesh, rules, precision=Precision(params=DOUBLE))
        local = {n: sh.shard(x, "batch seq") for n, x in batch.items()}
        got, grads = gradients(model, sh.shard_params(params, model.spec()), local, sh)
        worst = max(float(abs(v - value) / abs(value)) for v in per_rank(got))
        mine, theirs = sh.local(grads), sh.local(sh.shard_params(want, model.spec()))
        scales = _scales(want)
        parts = [(p, per_rank(a), per_rank(tree.named(theirs)[p])) for p, a in tree.named(mine).items()]
    for path, some, others in parts:
        worst = max(worst, *(float((a - b).norm() / scales[path]) for a, b in zip(some, others, strict=True)))
    return worst


def bare(model: Decoder) -> Decoder:
    """The model without a word on what its gradients are summed over, for the checking mode to find it."""

    class Bare(Decoder):
        def _ends(self) -> dict[str, Any]:
            return {n: replace(p, over=None) for n, p in super()._ends().items()}

        def _block_spec(self, index: int) -> dict[str, Any]:
            return {n: replace(p, over=None) for n, p in super()._block_spec(index).items()}

    return Bare(model.config)


# ------------------------------------------------------------------------------------------------------ the table


def table(of: tuple[str, ...] = FAMILIES) -> str:
    """The worst error of each family in each check, a line each."""
    head = ["family", "cases", "logits fp32", "float64", "gradients fp32", "float64"]
    rows = [[*head, "round trip", "tokens that differ", "cache", "2-rank TP"]]
    for family in of:
        names = [name for name, case in CASES.items() if case.family == family]
        row = [family, str(len(names))]
        for what in ("logits", "gradients"):
            row += [f"{max(errors(n, dtype)[what] for n in names):.0e}" for dtype in (SINGLE, DOUBLE)]
        row.append(f"{max(map(round_trip, names)):.0e}".replace("0e+00", "0"))
        row.append(f"{sum(generation(n)[0] for n in names)} of {NEW_TOKENS * len(PROMPTS) * len(names)}")
        row.append(f"{max(cache_error(n) for n in names if not CASES[n].grows):.0e}")
        row.append(f"{max(map(layout_error, names)):.0e}")
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "-|-".join("-" * w for w in widths))
    return "\n".join(f"| {line} |" if i != 1 else f"|-{line}-|" for i, line in enumerate(lines))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table())
