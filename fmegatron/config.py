"""The settings of the commands: frozen dataclasses, read from the command line and from TOML.

The string below a field is its help text. A field's TOML key is its path (`[optim]`, then `lr = 1e-3`) and its flag
is the same path (`--optim.lr 1e-3`). This module imports no torch, so that `--help` answers at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from fmegatron.axes import PIPELINE, parse_axes
from fmegatron.errors import UserError

SETTINGS = "config.toml"  # in a run's folder, what its settings were
Dtype = Literal["float64", "float32", "bfloat16", "float16"]
T = TypeVar("T")


@dataclass(frozen=True)
class ModelOverrides:
    """Sizes that replace the preset's; None keeps the preset's."""

    layers: int | None = None
    """Number of layers."""
    embed: int | None = None
    """Width of the stream between the layers."""
    heads: int | None = None
    """Number of query heads."""
    kv_heads: int | None = None
    """Number of key and value heads; divides the number of query heads."""
    head: int | None = None
    """Size of one head."""
    mlp: int | None = None
    """Width of the feed-forward part."""
    vocab: int | None = None
    """Size of the vocabulary, at least the tokenizer's."""
    max_seq: int | None = None
    """Longest sequence; with learned positions the number of their rows."""
    rope_theta: float | None = None
    """Base of the rotary positions' wavelengths."""
    window: int | None = None
    """Keys that a query sees in a windowed layer, its own included; 0: no windows."""
    pattern: tuple[Literal["full", "window"], ...] | None = None
    """Kinds of the layers, repeated over them, such as window full; with a window and no pattern all are windowed."""
    qk_norm: Literal["none", "head", "all"] | None = None
    """Norm of queries and keys: of each head, or of all heads together."""
    attention_softcap: float | None = None
    """Soft-cap of the attention scores; 0: none."""
    logit_softcap: float | None = None
    """Soft-cap of the final logits; 0: none."""
    activation: Literal["swiglu", "geglu", "geglu_tanh", "clamped_swiglu", "gelu", "gelu_tanh", "relu2"] | None = None
    """Activation of the feed-forward part; those with glu are gated."""
    norm_eps: float | None = None
    """Added to the variance in norms."""
    qkv_bias: bool | None = None
    """Biases of queries, keys and values."""
    out_bias: bool | None = None
    """Bias of attention's output."""
    mlp_bias: bool | None = None
    """Biases of the feed-forward part."""
    tied: bool | None = None
    """Whether the output matrix is the embedding."""
    fused_qkv: bool | None = None
    """Queries, keys and values in one leaf, so that one product makes them: faster with few heads on a rank."""
    fused_gate_up: bool | None = None
    """Gate and up in one leaf."""
    init_std: float | None = None
    """Standard deviation of the initial matrices."""
    family: str | None = None
    """Hugging Face's model_type that the model is exported as, such as mistral for windows in every layer."""


@dataclass(frozen=True)
class ExpertConfig:
    """Mixture of experts: replaces what the preset has, or makes experts of a dense preset's feed-forward parts."""

    experts: int | None = None
    """Number of experts of a layer; with it a dense preset becomes a mixture. None keeps the preset's, as everywhere here."""
    top_k: int | None = None
    """Experts of a token; 2 where a dense preset becomes a mixture."""
    mlp: int | None = None
    """Width of an expert; that of the dense feed-forward part where a dense preset becomes a mixture."""
    shared: int | None = None
    """Width of the expert that every token has beside its own; 0: none."""
    dense_layers: str | None = None
    """Indices of layers without experts, such as 0,1."""
    scores: Literal["softmax", "sigmoid", "sqrtsoftplus"] | None = None
    """Of the router's logits."""
    normalised: bool | None = None
    """Divide a token's weights by their sum."""
    scale: float | None = None
    """Multiplies a token's weights."""
    groups: int | None = None
    """Groups that the experts are in, for a choice limited to a token's best groups."""
    group_top_k: int | None = None
    """How many of these groups a token's experts are from."""
    choose: Literal["top_k", "expert_choice", "sinkhorn"] | None = None
    """Whether tokens choose their experts, experts their tokens, or Sinkhorn's algorithm balances the choice."""
    dtype: Literal["float32", "float64"] | None = None
    """Of the router."""
    jitter: float | None = None
    """Noise on the router's input: it is multiplied by numbers in [1 - jitter, 1 + jitter]."""
    capacity: float | None = None
    """Choices that an expert takes of a sequence, in shares of an even load; 0: all."""
    drop: Literal["probability", "position"] | None = None
    """Which choices of a full expert are dropped: those of least weight, or the last ones."""
    group: Literal["sequence", "batch", "approximate"] | None = None
    """On what balance, capacity, expert choice and Sinkhorn act: each sequence, or the whole batch (with one microbatch, or
    --moe.two-passes). approximate: the balance loss counts the microbatches so far, and so depends on their number."""
    two_passes: bool | None = None
    """With --moe.group batch and several microbatches: read the batch first without gradients, for what is about all of it.
    The result is that of one microbatch; a step costs a forward pass more."""
    switch_loss: float | None = None
    """Weight of the loss that balances the load, in every layer 1 where it is even. None: what the published config.json turns on:
    DeepSeek's aux_loss_alpha; of other presets nothing, and with --init-from router_aux_loss_coef with output_router_logits."""
    z_loss: float | None = None
    """Weight of the router's z-loss."""
    expert_bias: bool | None = None
    """Balance the load without a loss, by biases of the choice that move against it."""
    bias_rate: float | None = None
    """By how much these biases move in a step."""
    force: Literal["balanced", "random", "skewed"] | None = None
    """Replace the choice, for benchmarks."""


@dataclass(frozen=True)
class LossConfig:
    """What is minimised; evaluations always report the plain cross-entropy."""

    label_smoothing: float = 0.0
    """Share of the target's probability that is spread over the whole vocabulary."""
    z_loss: float = 0.0
    """Weight of the squared logarithm of the softmax's denominator, which keeps logits small (PaLM: 1e-4)."""


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its schedule."""

    name: Literal["adamw", "adam", "sgd", "lion", "adafactor", "muon"] = "adamw"
    """Optimizer; muon: the matrices of the layers with Muon, all else with AdamW."""
    lr: float = 3e-3
    """Learning rate after the warm-up; with muon that of AdamW's leaves."""
    min_lr: float = 0.0
    """Learning rate at the end of the schedule."""
    warmup: int = 20
    """Steps over which the learning rate rises linearly from zero."""
    schedule: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    """How the learning rate goes from lr to min_lr; wsd: constant, then down over the last `decay` steps; inverse_sqrt:
    as 1 / sqrt(step) behind the warm-up, whatever the number of steps."""
    decay: int | None = None
    """Steps of wsd's final decay; None: a fifth of all steps."""
    wsd_form: Literal["linear", "cosine", "exponential", "minus_sqrt"] | None = None
    """Form of wsd's final decay; None: linear."""
    weight_decay: float = 0.1
    """Weight decay of matrices (adam and sgd: L2 regularisation); norms and biases have none."""
    beta1: float = 0.9
    """Decay of the gradient's running mean, of adamw, adam and lion."""
    beta2: float = 0.95
    """Decay of the squared gradient's running mean; of lion's momentum."""
    eps: float = 1e-8
    """Added to the root of the second moment, of adamw and adam."""
    clip: float = 1.0
    """Largest global gradient norm; 0 never clips."""
    momentum: float | None = None
    """Momentum of sgd (None: 0.9) and muon (None: 0.95); of adafactor a mean of the updates (None: no such mean)."""
    nesterov: bool = False
    """Nesterov's momentum for sgd; muon always has it."""
    muon_lr: float | None = None
    """Learning rate of Muon's matrices after the warm-up; None: 0.02. They share warm-up and schedule."""
    muon_adjust: Literal["original", "match_rms_adamw", "none"] | None = None
    """Factor of Muon's rate by a matrix's sizes; None: original. match_rms_adamw: AdamW's rates fit, such as 3e-4."""
    lr_scale: str | None = None
    """Multipliers of the learning rate by leaf, the last that matches counts: embed=0.1,layers.*.q=0.5 by path, or
    dims:embed mlp=0.5 by dims."""
    weight_decay_of: str | None = None
    """Weight decay by leaf in place of the general one, written as lr_scale: embed=0,dims:embed=0.01."""
    ema: float | None = None
    """Decay of a moving average of the weights, such as 0.999; it is evaluated too, and `--weights ema` uses it."""


@dataclass(frozen=True)
class BatchConfig:
    """What one step sees."""

    size: int = 16
    """Sequences in a step, over all ranks and microbatches."""
    seq_len: int = 256
    """Tokens in a sequence."""
    microbatches: int = 1
    """Pieces that a step is cut into, one after the other; the result is the same, with less memory."""


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats."""

    params: Dtype = "float32"
    """Format of the parameters at rest."""
    compute: Dtype | None = None
    """Format of matrix products; None: bfloat16 on a GPU, else that of the parameters."""
    reduce: Dtype | None = None
    """Format in which gradients are summed over ranks; None: float32, or wider parameters' own."""
    wire: Dtype | None = None
    """Format in which gradients travel between ranks, each of which adds what it receives in that of --precision.reduce: with
    bfloat16 half the bytes, and one rounding of each rank's gradient; None: the network adds, in --precision.reduce."""
    master: Dtype | None = None
    """Format of the optimizer's own copy of the parameters; None: float32 where the parameters are narrower and are not
    rounded stochastically, else no copy. The parameters' own format: no copy."""
    moments: Literal["float64", "float32", "bfloat16", "float8"] | None = None
    """Format of the optimizer's moments; None: float32, or wider parameters' own. float8, of adamw and adam: a byte each."""
    stochastic_rounding: bool = False
    """Round what the optimizer writes in bfloat16 (parameters, moments) up or down by chance, in place of a copy."""
    loss_scale: float | Literal["dynamic"] | None = None
    """With float16: dynamic, or a fixed number; None: dynamic where products, parameters or sums of gradients are in float16."""
    loss_scale_initial: float = 65536.0
    """First dynamic loss scale."""
    loss_scale_window: int = 1000
    """Finite steps in a row after which the dynamic loss scale doubles."""
    loss_scale_hysteresis: int = 2
    """Overflows after which the dynamic loss scale halves; a fixed one ends the run after 8 in a row."""
    loss_scale_minimum: float = 1.0
    """Smallest dynamic loss scale; an overflow there ends the run."""
    fp8_gradients: Literal["e5m2", "e4m3"] | None = None
    """With --fp8, format of output gradients; None: e5m2 where an operand has one scale, else e4m3."""
    fp8_margin: int = 0
    """With --fp8, powers of two that scales are lower than they might be."""
    fp8_history: int = 16
    """With --fp8 delayed, steps whose largest magnitudes count."""
    fp8_keep: tuple[str, ...] = ()
    """With --fp8, computations of a layer that stay in the compute format, such as o down; * stands for any letters."""
    fp8_keep_first: int = 0
    """With --fp8, so many first layers stay in the compute format."""
    fp8_keep_last: int = 0
    """With --fp8, so many last layers stay in the compute format."""
    fp8_unaligned: Literal["refuse", "keep"] = "refuse"
    """With --fp8, what becomes of products whose sizes are no multiples of 16 (blockwise: 128): refuse, or keep them in the
    compute format."""
    fp8_agree: bool = True
    """With --fp8, scales are agreed over ranks, so that the mesh does not change the result; if not, each rank has its own."""
    fp8_backend: Literal["auto", "native", "emulated", "te"] = "auto"
    """With --fp8, who computes: native, torch on a GPU; emulated, the same numbers anywhere, slowly; te, Transformer Engine's
    casts; auto: native on a GPU."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and what to keep."""

    every: int = 200
    """Steps between checkpoints; 0: only at the end or when stopped."""
    keep: int = 2
    """Newest checkpoints to keep; 0: all."""


@dataclass(frozen=True)
class EvalConfig:
    """Loss on held-out text."""

    every: int = 100
    """Steps between evaluations; 0: only at the end."""
    batches: int = 8
    """Batches in an evaluation; the one at the end reads all that is held out."""
    fraction: float = 0.05
    """Share of the documents held out from training."""


@dataclass(frozen=True)
class LogConfig:
    """Where progress goes."""

    seconds: float = 10.0
    """Seconds between lines of progress in the log (and on a standard output that is not a terminal)."""
    tensorboard: bool = True
    """Write TensorBoard files to OUT/tensorboard."""
    load: int = 10
    """Of a model with experts, steps between rows of OUT/load.jsonl: how many tokens each expert of each layer got; 0: none."""


@dataclass(frozen=True)
class TrainConfig:
    """Train a language model; with no argument: a small Llama on the sources of Python's standard library.

    Another model by --model and --model-overrides, or the pretrained one of a Hugging Face folder by --init-from.
    """

    config: str | None = None
    """TOML file with values for any of these settings; the command line has the last word."""
    out: str = "runs/train"
    """Folder of the run: checkpoints, metrics, log and the resolved settings."""
    resume: bool = False
    """Go on from the newest checkpoint in `out`, by default with the settings of that run; flags override them."""
    steps: int = 180
    """Optimizer steps in all, those before a resume included. More of them on a resume leave the order of the data as it
    was; a cosine, linear or wsd schedule is then that of the longer run."""
    seed: int = 0
    """Seed of initial values, data order and dropout."""
    other_data: bool = False
    """With --resume: go on with other data, or data read in another way, than the run has had. The order of the new data
    begins where the old order was."""

    data: str | None = None
    """JSONL or text file, folder of text, or prefix of a .bin/.idx pair; None: the sources of Python's standard library."""
    tokenizer: str | None = None
    """Folder with, or path of, a tokenizer.json; None: that of --init-from, else train a byte-level BPE on the training
    text."""
    tokenizer_vocab: int = 4096
    """Vocabulary of the tokenizer to train when none is given."""
    text_key: str = "text"
    """Key of the text in a JSONL file."""

    model: str | None = None
    """Preset: tiny, gpt2-tiny, gpt2, llama3.2-1b, mistral-7b-v0.3, qwen3-0.6b, gemma3-1b, phi3-mini, olmo2-1b and others,
    which the message for a wrong name lists; None: tiny. The tiny ones take the tokenizer's vocabulary."""
    init_from: str | None = None
    """Folder of a Hugging Face model, with config.json and safetensors, to continue training from, in place of --model.
    Of --model-overrides those are allowed then that change no parameter's shape. With --moe.experts a dense model is upcycled:
    every expert begins as a copy of its feed-forward part."""
    resize_vocab: int | None = None
    """Size of the vocabulary with --init-from. New rows are the mean of the old ones, with a little noise."""
    ignore_fields: tuple[str, ...] = ()
    """Fields of --init-from's config.json that are not known here and that you know to change nothing: a,b."""
    model_overrides: ModelOverrides = field(default_factory=ModelOverrides)
    moe: ExpertConfig = field(default_factory=ExpertConfig)
    mtp: int | None = None
    """Modules behind the layers that learn to predict a token further each (multi-token prediction, DeepSeek-V3); evaluation and
    generation do without them. None: as many as the model has, which is none but for a folder of --init-from with some."""
    mtp_weight: float = 0.1
    """Weight of the mean of these modules' losses."""
    dropout: float = 0.0
    """Probability that dropout zeroes an element of a layer's output."""

    mesh: str | None = None
    """How ranks are laid out, as axis=size: dp and fsdp divide the batch, cp the sequence, tp heads, mlp and vocabulary,
    pp the layers (a pipeline), such as pp=2,tp=4; ranks of the last axis are adjacent. Their product is the number of ranks. None: dp of all ranks."""
    store: tuple[str, ...] = ()
    """Mesh axes over which --zero divides what is held between steps, such as dp, or fsdp cp. None given: nothing is
    divided, or with --zero 1, 2 or 3 over fsdp, else dp. Fewer axes than divide the batch: hybrid sharding (HSDP)."""
    zero: int | None = None
    """Stage of ZeRO, what the axes of --store divide: 0, nothing; 1, optimizer state; 2, gradients too; 3, parameters too
    (FSDP). None: 3 with --store, else 0."""
    sp: bool = False
    """Sequence parallelism: between attention and feed-forward parts, where tp would hold copies, the sequence is divided
    over tp. Off by default."""
    overlap: int = 0
    """Chunks into which tensor-parallel products are cut, so that gathers and sums over tp run beside them; 0: whole."""
    cp: Literal["gather", "ring", "ulysses", "ulysses+ring"] = "gather"
    """How attention reads the sequence that the mesh axis cp divides (without cp it means nothing): gather, all ranks get
    all keys and values; ring, they go from neighbour to neighbour; ulysses, an all-to-all gives each rank whole sequences
    of some heads; ulysses+ring, that between near ranks and a ring between far ones."""
    ep: int = 1
    """Ranks over which a layer's experts lie; with etp it divides the ranks of --mesh, whatever dp, cp and tp are."""
    etp: int = 1
    """Ranks that hold parts of each expert. Where neither ep nor etp is given that is tp."""
    dispatch: Literal["dense", "all-gather", "all-to-all", "padded"] = "all-to-all"
    """How tokens reach their experts: dense, every expert computes every token (slow, for comparison); all-gather, tokens
    are gathered over ep; all-to-all, each goes to the ranks of its experts and back; padded, the same with every expert filled up
    to --moe.capacity, so that all sizes are known beforehand."""
    microbatch_overlap: Literal["none", "pairs", "1f1b"] = "none"
    """Which microbatches compute while the tokens of another one are on their way to experts on other ranks and back. pairs: two
    at a time, with the activations of two; 1f1b: the forward of each with the backward of the one before (with pp, the pairs that --schedule
    dualpipev joins). Results are the same."""
    record_routing: str | None = None
    """Folder to which the experts that every token chose are written, a file a step; of prediction modules behind those of
    the layers."""
    replay_routing: str | None = None
    """Folder of --record-routing whose choices replace those of the router, step by step, on whatever mesh; their weights and
    the router's gradients are this run's."""
    nproc: int = 1
    """Processes to start on this machine; under torchrun none are started."""
    schedule: str = "1f1b"
    """Order in which the stages of a pipeline (mesh axis pp) compute the microbatches: gpipe, 1f1b, interleaved, bfs, zbh1,
    zbv, dualpipev, or a file with a table of your own (name it with a / or a .). fmegatron schedule draws them, and writes a
    table with --out."""
    virtual: int | None = None
    """Stages on each rank of a pipeline, for interleaved and bfs; None: 2."""
    group: int | None = None
    """Microbatches that run through one stage of a rank before its next stage has its turn, for interleaved; None: as many as
    there are ranks, or a little more where that does not divide the microbatches."""
    stages: str | None = None
    """What each stage of a pipeline holds, in Megatron-LM's notation: E the embedding, t a layer, L the head, | between
    stages, such as Et|ttt|ttL. Or by a word: ends, even with embedding and head counted as a layer each; cost, so that the
    costliest stage is as cheap as can be by estimated floating-point operations; first=2,last=1, so many layers on the first
    and the last stage. None: as even as can be."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""

    batch: BatchConfig = field(default_factory=BatchConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    fp8: Literal["tensorwise", "rowwise", "blockwise", "delayed"] | None = None
    """Matrix products of the layers in fp8, forward and backward, by what shares a scale: tensorwise, a tensor; rowwise, a row;
    blockwise, 1×128 numbers of activations and 128×128 of weights; delayed, a tensor, by its last steps. Experts are scaled by
    rows with tensorwise and rowwise, and stay in the compute format with the others, as the router does. More under
    --precision.fp8-*."""
    remat: str = "everything"
    """What a layer keeps for the backward pass; the rest is computed again: everything, nothing (but its input), or the
    results of named computations, such as attention or attention,q,k,v,o,gate,up,down. With :host behind a name, as in
    attention:host,gate, that result waits in host memory, and comes back a layer ahead."""
    compile: bool = False
    """Compile the layers with torch.compile."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """What computes norms, activations, rotary embedding and the loss: Triton's one-pass kernels, torch's operations, or
    auto: the first on a GPU, the second elsewhere. With auto, flash-attn-4 computes attention where it is installed and
    faster (pip install fmegatron[kernels])."""
    keep_probabilities: bool | None = None
    """Keep the loss's probabilities for the backward pass instead of computing logits again; None: on a GPU in half
    precision, up to 2^30 of them."""
    recorded: bool = False
    """Record a step and play it, for small models, on whose calls the host spends more time than on their arithmetic: as a
    CUDA graph on one GPU, as a list of calls on a CPU in one process; with adamw or adam. Off by default, as a loss that
    is not finite is then found after the update."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory; it comes to the GPU a part at a time while it is updated."""
    debug: bool = False
    """On a loss or gradient that is not finite, find the operation where it arose (slow)."""
    check_replicas: int = 0
    """Every so many steps, and before a checkpoint is saved then, compare by hashes what several ranks hold of parameters and
    optimizer state, bit by bit; a difference ends the run and names leaves and ranks. 0: never."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True)
class GenerateConfig:
    """Continue prompts with a trained model."""

    checkpoint: str
    """Run folder, one checkpoint, or folder of a Hugging Face model."""
    weights: Literal["params", "ema"] = "params"
    """ema: the moving average that a run with --optim.ema keeps."""
    prompt: tuple[str, ...] = ("",)
    """One or several texts to continue."""
    tokens: int = 100
    """Tokens to generate for each prompt, at most."""
    temperature: float = 0.8
    """Divides the logits; 0: always the likeliest token."""
    top_k: int | None = None
    """Draw only among this many likeliest tokens."""
    top_p: float | None = None
    """Draw only among the likeliest tokens whose probabilities reach this sum."""
    seed: int = 0
    """Seed of the draws."""
    speculate: bool = False
    """The model's prediction module (of a run with --mtp) guesses a token ahead, which the model checks with the next one: the same
    text at temperature 0, and the same distribution at others, in fewer passes. How many guesses were right is printed."""
    stream: bool = True
    """Print text as it arises (with one prompt)."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    dtype: Dtype | None = None
    """Format of the parameters; None: as saved."""
    mesh: str | None = None
    """pp=2,tp=2: the layers over stages and their matrices over ranks, on 4 processes of this machine, each of which reads
    its own; torchrun starts those of several machines. None: one process."""
    stages: str | None = None
    """With --mesh pp=N, which layers lie on which process, in Megatron-LM's notation: Et|ttt|tL. None: as even as can be."""

    def ranks(self) -> int:
        """The number of processes. Raises UserError for a mesh of other axes."""
        if self.mesh is None:
            if self.stages is not None:
                raise UserError(f"--stages {self.stages} is for several processes: add --mesh pp=N, or leave it out")
            return 1
        axes = parse_axes(self.mesh, argument="--mesh")
        if other := next((n for n, size in axes.items() if size > 1 and n not in (PIPELINE, "tp", "dp")), None):
            raise UserError(f"--mesh {self.mesh}: generation runs over pp, tp and dp: leave {other} out")
        return math.prod(axes.values())


@dataclass(frozen=True)
class ExportConfig:
    """Write a checkpoint in another format."""

    checkpoint: str
    """Run folder or one checkpoint."""
    out: str
    """Folder to write to; must not exist or be empty."""
    to: Literal["hf"] = "hf"
    """hf: a folder that Hugging Face transformers loads."""
    weights: Literal["params", "ema"] = "params"
    """ema: the moving average that a run with --optim.ema keeps."""
    dtype: Dtype | None = None
    """Format of the parameters; None: as saved."""


@dataclass(frozen=True)
class PreprocessConfig:
    """Turn JSONL into Megatron-format .bin and .idx files."""

    data: tuple[str, ...]
    """JSONL files, or folders of them; each line is a document."""
    tokenizer: str
    """Folder with, or path of, a tokenizer.json."""
    out: str
    """Where to write: OUT_{text_key}_document.bin and .idx."""
    text_key: str = "text"
    """Key of the text in a JSONL file."""
    workers: int = 1
    """Processes that tokenize."""
    append_eod: bool = True
    """End each document with the tokenizer's end-of-document token."""


def load_config(cls: type[T], path: str | Path) -> T:
    """The settings of a TOML file; keys that it lacks have their defaults.

    Raises UserError: no such file, not TOML, an unknown key (the nearest is named), a value of the wrong type.
    """
    return load_configs(cls, path)


def load_configs(cls: type[T], *paths: str | Path) -> T:
    """The settings of several TOML files, of which a later one has the last word. Raises UserError as `load_config`."""
    whole: dict[str, Any] = {}
    for path in paths:
        values = _read_toml(path)
        from_dict(cls, values, where=f"--config {path}: ")  # so that a mistake is told of its own file
        whole = _merged(whole, values)
    return from_dict(cls, whole, where=f"--config {paths[-1]}: ")


def _read_toml(path: str | Path) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: cannot read it ({_reason(error)}); give the path of a TOML file") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--config {path}: not valid TOML: {error}") from None


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Nested dicts in one; where both have a key, `above` counts."""
    both = {k for k in below.keys() & above.keys() if isinstance(below[k], dict) and isinstance(above[k], dict)}
    return {**below, **above, **{k: _merged(below[k], above[k]) for k in both}}


def save_config(config: Any, path: str | Path) -> None:
    """Write all settings as TOML that `load_config` reads back equal; the file appears whole, whenever it is killed.

    TOML has no null, so a setting that is None is left out; every setting that may be None has that default.
    """
    part = Path(path).with_suffix(".part")
    part.write_text(to_toml(config), encoding="utf-8")
    os.replace(part, path)


def to_toml(config: Any) -> str:
    """The settings as the text of a TOML file: single values first, then one table for each group."""
    lines, tables = [], []
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            if body := to_toml(value):
                tables.append(f"\n[{f.name}]\n{body}")
        elif value is not None:
            lines.append(f"{f.name} = {_toml_value(value)}\n")
    return "".join(lines + tables)


def from_dict(cls: type[T], values: dict[str, Any], *, where: str = "") -> T:
    """A config from nested dicts as TOML gives them. `where` starts the message of a UserError."""
    return _build(cls, values, (), cls, where)


def check_config(config: TrainConfig) -> None:
    """Refuse numbers that mean nothing, such as a negative size. Raises UserError naming the setting."""
    for path, kind, value in _settings(config):
        if value is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        name = path.split(".")[-1]
        if path in _POSITIVE or (kind == "model_overrides" and name not in _ZERO_IS_NONE):
            ok, need = 0 < value < float("inf"), "greater than 0"
        elif path in _FRACTIONS:
            ok, need = 0 <= value < 1, "at least 0 and less than 1"
        elif path == "eval.fraction":
            ok, need = 0 < value < 1, "between 0 and 1"
        elif name == "seed":
            ok, need = 0 <= value < 2**32, "from 0 to 2**32 - 1"
        else:
            ok, need = 0 <= value < float("inf"), "a number that is not negative"
        if not ok:
            raise UserError(f"--{path.replace('_', '-')} {value} must be {need}")
    if config.batch.size < config.batch.microbatches:
        raise UserError(
            f"--batch.size {config.batch.size} is less than --batch.microbatches {config.batch.microbatches}, each of which "
            "needs a row: use fewer"
        )


_POSITIVE = {
    "steps",
    "nproc",
    "virtual",
    "tokenizer_vocab",
    "optim.lr",
    "optim.eps",
    "batch.size",
    "batch.seq_len",
    "batch.microbatches",
    "eval.batches",
    "optim.muon_lr",
    "resize_vocab",
    "precision.loss_scale",
    "precision.loss_scale_initial",
    "precision.loss_scale_window",
    "precision.loss_scale_hysteresis",
    "precision.loss_scale_minimum",
    "precision.fp8_history",
}
_FRACTIONS = {"dropout", "loss.label_smoothing", "optim.beta1", "optim.beta2", "optim.momentum", "optim.ema"}
_ZERO_IS_NONE = {"window", "attention_softcap", "logit_softcap"}  # of the overrides: 0 takes the preset's away


def _settings(config: Any, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """(dotted path, group, value) of every setting."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from _settings(value, f.name)
        else:
            yield (f"{prefix}.{f.name}" if prefix else f.name), prefix, value


def _build(cls: type[T], values: dict[str, Any], path: tuple[str, ...], root: type, where: str) -> T:
    hints = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for key, value in values.items():
        dotted = ".".join((*path, key))
        if key not in names:
            nearest = nearest_name(dotted, list(_keys(root)))
            raise UserError(f"{where}unknown key {dotted!r}; the nearest known key is {nearest!r}")
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise UserError(f"{where}key {dotted!r} is {value!r}, but must be a table [{dotted}]")
            given[key] = _build(typing.cast(type, hint), value, (*path, key), root, where)
        else:
            given[key] = _convert(value, hint, dotted, where)
    missing = [f.name for f in dataclasses.fields(cls) if _required(f) and f.name not in given]  # type: ignore[arg-type]
    if missing:
        raise UserError(f"{where}key {missing[0]!r} is missing; it has no default")
    return cls(**given)


def _convert(value: Any, hint: Any, dotted: str, where: str) -> Any:
    """The value as the type asks, or a UserError. An int is accepted for a float; nothing else is converted."""
    # Literal[…] | None is a typing.Union, int | None a types.UnionType
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if union else (hint,)
    for option in options:
        if typing.get_origin(option) is Literal:
            if isinstance(value, str) and value in typing.get_args(option):
                return value
        elif typing.get_origin(option) is tuple:
            known = _choices(option)
            if isinstance(value, list | tuple) and all(isinstance(v, str) and (not known or v in known) for v in value):
                return tuple(value)
        elif option is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        elif isinstance(value, option) and not (isinstance(value, bool) and option is not bool):
            return value
    raise UserError(f"{where}key {dotted!r} is {value!r}, but must be {' or '.join(_describe(options))}")


def check_choices(cls: type, flags: Iterable[str]) -> None:
    """Refuse a flag's value that is none of its choices. flags: as on the command line, `--name value` or `--name=value`.

    Raises UserError naming the flag, the value, the nearest choice and all of them.
    """
    hints = dict(_hints(cls))
    flags = list(flags)
    for i, flag in enumerate(flags):
        name, given, value = flag.partition("=")
        hint = hints.get(name.removeprefix("--").replace("-", "_")) if name.startswith("--") else None
        options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        choices = [c for o in options if typing.get_origin(o) is Literal for c in typing.get_args(o)]
        values = [value] if given else flags[i + 1 : i + 2]
        if not choices or not values or (float in options and _is_number(values[0])):
            continue
        choices += ["None"] if types.NoneType in options else []
        if values[0] not in choices:
            near = nearest_name(values[0], choices)
            raise UserError(f"{name} {values[0]} is not known; did you mean {near}? Choices: {', '.join(choices)}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _describe(options: tuple[Any, ...]) -> list[str]:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    described = []
    for option in options:
        if typing.get_origin(option) is Literal:
            described.append("one of " + ", ".join(repr(choice) for choice in typing.get_args(option)))
        elif typing.get_origin(option) is tuple:
            known = ", ".join(repr(choice) for choice in _choices(option))
            described.append(f"a list of {known}" if known else "a list of strings")
        elif option is not types.NoneType:
            described.append(names[option])
    return described


def _choices(of: Any) -> tuple[str, ...]:
    """The strings that a tuple type allows; () for any."""
    item = typing.get_args(of)[0]
    return typing.get_args(item) if typing.get_origin(item) is Literal else ()


def _required(f: dataclasses.Field) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _keys(cls: type) -> Iterator[str]:
    """Every dotted key of a config class."""
    return (key for key, _ in _hints(cls))


def _hints(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, type) of everything in a config class."""
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from _hints(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            yield prefix + name, hint


def nearest_name(name: str, names: list[str]) -> str:
    """The one of `names` most like `name`, as a whole or by its last part: "lr" is nearest to "optim.lr"."""

    def likeness(other: str) -> float:
        last, other_last = name.split(".")[-1], other.split(".")[-1]
        whole = difflib.SequenceMatcher(None, name, other).ratio()
        # a little less than the whole, so that of two groups with the same last part the one that was named wins
        return max(whole, 0.98 * difflib.SequenceMatcher(None, last, other_last).ratio() + 0.01 * whole)

    return max(names, key=likeness)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # JSON's escapes are TOML's, but TOML also wants DEL escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return repr(value)


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else "not UTF-8 text"
