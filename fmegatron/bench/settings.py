"""The settings of `fmegatron bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fmegatron.config import nearest_name
from fmegatron.errors import UserError

PEERS = ("hf", "megatron")
PRECISIONS = ("fp32", "bf16", "fp8-tensorwise", "fp8-rowwise", "fp8-blockwise", "fp8-delayed")
MODES = ("compiled", "eager", "graph")
MESHES = ("none", "one-rank")
FUSED = ("qkv", "gate_up")


@dataclass(frozen=True)
class BenchConfig:
    """Time training steps of a model, beside other libraries that are installed, in one run.

    All contenders have the same weights and see the same tokens; they take turns, and the order changes every round.
    Prints a table of medians, and saves all samples as JSON and a bar chart as SVG.
    """

    model: str | None = None
    """1.2b, 3b, 8b, gpt2-124m, or any model of `train`; None: 1.2b on a GPU, tiny on a CPU."""
    precision: str | None = None
    """fp32, bf16, fp8-tensorwise, fp8-rowwise, fp8-blockwise or fp8-delayed, several behind commas; None: bf16 on a GPU,
    fp32 on a CPU."""
    peers: str = ""
    """Which others to time: hf (transformers), megatron (Megatron-core; with Transformer Engine on a GPU), or both behind
    a comma."""
    modes: str | None = None
    """compiled (each block by torch.compile), eager, graph (recorded: compiled blocks as a CUDA graph, on a CPU eager
    ones as a list of calls), several behind commas; None: compiled,eager on a GPU, eager on a CPU."""
    meshes: str = "none,one-rank"
    """none, one-rank (rules of TP, SP and FSDP on axes of size one), or both behind a comma."""
    grads: Literal["bfloat16", "float32"] | None = None
    """Format of the gradients, of ours and of peers; None: that of the parameters."""
    batch: int | None = None
    """Sequences in a step; None: the model's in this benchmark."""
    seq: int | None = None
    """Tokens in a sequence; None: the model's in this benchmark."""
    layers: int | None = None
    """Number of layers; None: the model's."""
    fused: str = ""
    """Which of our layers' products are one: qkv, gate_up, or both behind a comma, as --model-overrides.fused-qkv True of
    `train`; Megatron's always are."""
    remat: str = "everything"
    """What our layers keep for the backward pass, as for `train`: everything, nothing, or names of computations."""
    moments: Literal["float32", "bfloat16", "float8"] = "float32"
    """Format of our optimizer's moments."""
    master: bool = True
    """Whether our optimizer keeps a float32 copy of narrower parameters, as peers do."""
    steps: int = 20
    """Rounds, in each of which every contender makes one step."""
    warmup: int = 2
    """Steps of each contender before the first round, beside the one that compiles."""
    whole: bool = True
    """Time whole steps too, with clipping and AdamW, not forward and backward alone."""
    profile: bool = False
    """Also print the time of one step by kinds of kernels, and save the names of the slowest."""
    hf_compile: Literal["model", "layers", "none"] | None = None
    """How transformers is compiled: the model as one graph (slow to begin with), each layer, or not; None: model on a GPU,
    none on a CPU."""
    megatron_optimizer: Literal["fused", "default"] = "fused"
    """On a GPU with bfloat16 gradients. fused: Transformer Engine's Adam holds the master copy and reads the gradients as
    they are (Megatron's precision-aware optimizer); default: Megatron's own copies around it."""
    megatron_options: str = ""
    """Further fields of Megatron's TransformerConfig, as name=value behind commas."""
    peak_tflops: float | None = None
    """What utilisation refers to; None: the maker's figure for the GPU (dense), else a product measured here."""
    device: Literal["cpu", "cuda"] | None = None
    """Where to; None: a GPU if there is one."""
    seed: int = 0
    """Seed of weights and tokens."""
    calibrate: str | None = None
    """Instead of steps of a model measure this machine for `fmegatron plan`, by kernels alone, into this file NAME.toml."""
    out: str = "bench"
    """Folder for bench.json and bench.svg."""


def listed(flag: str, text: str, known: Sequence[str], *, empty: bool = False) -> tuple[str, ...]:
    """The names behind commas in a flag's value, each once.

    Raises UserError for a name that is not among `known`, and for none at all unless `empty`.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            near = nearest_name(name, list(known))
            raise UserError(f"{flag} {name} is not known; did you mean {near}? Choices: {', '.join(known)}")
    if not names and not empty:
        raise UserError(f"{flag} {text!r} names nothing: give some of {', '.join(known)}")
    return names
