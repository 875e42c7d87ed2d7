"""Does training here learn what transformers with torch.optim learns?

The same initial weights and the same batches of text, two training loops: ours (`train_step`, adamw, clipping, a
schedule) and transformers' model with torch.optim.AdamW and torch.nn.utils.clip_grad_norm_. `python -m tests.learning`
runs 300 steps of a small Llama and a small GPT-2 in float64, prints the largest difference of the losses and of the
final weights, and draws both curves.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from fmegatron import tree
from fmegatron.models import load_hf
from fmegatron.models.hf import model_of
from fmegatron.optim import adamw, chain, clip_by_global_norm, decay_mask
from fmegatron.plot import VALIDATION, Series, chart
from fmegatron.precision import Precision
from fmegatron.schedules import cosine
from fmegatron.sharding import Sharding
from fmegatron.step import TrainState, train_step

CLIP, DECAY, BETAS, EPS, PEAK, WARMUP = 1.0, 0.1, (0.9, 0.95), 1e-8, 3e-3, 20
ROWS, LENGTH = 8, 64
LLAMA: dict[str, Any] = dict(
    vocab_size=256,
    hidden_size=48,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=10,
    max_position_embeddings=LENGTH,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    initializer_range=0.05,
)
GPT2: dict[str, Any] = dict(
    vocab_size=256,
    n_positions=LENGTH,
    n_embd=48,
    n_layer=3,
    n_head=3,
    n_inner=128,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    initializer_range=0.05,
)


@dataclass
class Curves:
    """Losses and gradient norms of every step by both loops, and the largest relative difference of a final
    parameter."""

    ours: list[float]
    theirs: list[float]
    our_norms: list[float]
    their_norms: list[float]
    weights: float

    @property
    def loss(self) -> float:
        """The largest relative difference of a step's loss."""
        return _largest(self.ours, self.theirs)

    @property
    def norm(self) -> float:
        """The largest relative difference of a step's gradient norm."""
        return _largest(self.our_norms, self.their_norms)


def _largest(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def compare(family: str, steps: int, dtype: torch.dtype = torch.float64) -> Curves:
    """Train both ways for `steps` steps and compare."""
    reference = theirs_of(family).to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        if dtype == torch.float64 and family == "llama":  # the rotary table is not saved, and was made in float32
            head = LLAMA["head_dim"]
            power = torch.arange(0, head, 2, dtype=torch.float64) / head
            reference.model.rotary_emb.inv_freq = 10000.0**-power
        ours, our_norms, state = train(Path(folder), steps, dtype)
        theirs, their_norms = train_reference(reference, steps)
        reference.save_pretrained(folder)
        _, wanted = load_hf(folder, dtype=dtype)
    named = tree.named(wanted)
    # The bias of keys is not determined by any loss (softmax ignores it, where there is no rotary): what is there is
    # rounding, so differences are measured against a floor.
    floor = 1e-3 * float(torch.stack([p.norm() for p in named.values()]).norm()) / len(named) ** 0.5
    errors = [
        float((p - named[path]).norm() / max(named[path].norm(), floor)) for path, p in tree.named(state.params).items()
    ]
    return Curves(ours, theirs, our_norms, their_norms, max(errors))


def theirs_of(family: str) -> Any:
    torch.manual_seed(0)
    if family == "llama":
        config = transformers.LlamaConfig(**LLAMA, attn_implementation="eager")
        return transformers.LlamaForCausalLM(config)
    ids = {"bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **ids, attn_implementation="eager"))


def batches(steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Bytes of a Python module's source, with unequal masks; the n-th batch is always the same."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()), dtype=torch.int64)
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        starts = torch.randint(0, len(text) - LENGTH - 1, (ROWS,), generator=draw)
        rows = torch.stack([text[s : s + LENGTH + 1] for s in starts.tolist()])
        mask = torch.rand(ROWS, LENGTH, generator=draw) < torch.linspace(0.3, 1.0, ROWS)[:, None]
        yield {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous(), "mask": mask}


def train(folder: Path, steps: int, dtype: torch.dtype) -> tuple[list[float], list[float], TrainState]:
    """(losses, gradient norms, final state) here."""
    model, params = model_of(folder), load_hf(folder, dtype=dtype)[1]
    optimizer = chain(
        clip_by_global_norm(CLIP),
        adamw(schedule(), betas=BETAS, eps=EPS, weight_decay=DECAY, mask=decay_mask(model.spec())),
    )
    sh = Sharding(precision=Precision(params=dtype))
    step = train_step(model.loss, optimizer, weights=model.weights, sh=sh, microbatches=2, donate=True)
    state = TrainState(0, params, optimizer.init(params))
    losses, norms = [], []
    for batch in batches(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    return losses, norms, state


def train_reference(model: Any, steps: int) -> tuple[list[float], list[float]]:
    """(losses, gradient norms) of transformers with torch.optim."""
    every = list(model.parameters())
    groups = [
        {"params": [p for p in every if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=BETAS, eps=EPS)
    rate = schedule()
    losses: list[float] = []
    norms: list[float] = []
    for step, batch in enumerate(batches(steps)):
        with exact(model):
            logits = model(batch["tokens"]).logits
            each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
            loss = (each * batch["mask"].flatten()).sum() / batch["mask"].sum()
            optimizer.zero_grad()
            loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(every, CLIP)))
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def schedule() -> Any:
    return cosine(PEAK, total=300, warmup=WARMUP, end=PEAK / 10)


@contextlib.contextmanager
def exact(model: Any) -> Iterator[None]:
    """transformers computes norms, tables and softmax in float32 whatever the model's dtype; in float64 here."""
    if next(model.parameters()).dtype != torch.float64:
        yield
        return
    import transformers.models.gpt2.modeling_gpt2 as gpt2
    import transformers.models.llama.modeling_llama as llama

    class Wide:
        float32 = float = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    plain_float = torch.Tensor.float
    llama.torch = gpt2.torch = Wide()
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        llama.torch = gpt2.torch = torch
        torch.Tensor.float = plain_float  # type: ignore[method-assign]


def picture(found: dict[str, Curves]) -> str:
    """Ours as lines, theirs as dots every tenth step."""
    colours = iter((("#2563a8", "#7aa7d9"), (VALIDATION, "#e59b6b")))
    series = []
    for family, curves in found.items():
        line, dot = next(colours)
        points = list(enumerate(curves.ours, 1))
        theirs = list(enumerate(curves.theirs, 1))[::10]
        series.append(Series(f"{family}, fmegatron", points, line, width=1.5))
        series.append(Series(f"{family}, transformers + torch.optim", theirs, dot, width=0, dots=True))
    title = "The same weights and batches, two training loops (float64)"
    return chart(series, title=title, y_label="loss (nats per byte)", x_from=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="learning.svg", help="where to draw the curves")
    args = parser.parse_args()
    found = {family: compare(family, args.steps) for family in ("llama", "gpt2")}
    for family, curves in found.items():
        print(
            f"{family:6} {args.steps} steps, float64: loss {curves.ours[0]:.4f} -> {curves.ours[-1]:.4f}; "
            f"largest relative difference of a loss {curves.loss:.1e}, of a final parameter {curves.weights:.1e}"
        )
        short = compare(family, 50, torch.float32)
        print(f"{family:6} 50 steps, float32: largest relative difference of a loss {short.loss:.1e}")
    Path(args.out).write_text(picture(found), encoding="utf-8")
    print(f"curves in {args.out}")


if __name__ == "__main__":
    main()
