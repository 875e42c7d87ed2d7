"""What the benchmark computes: models with their batches, and how many floating-point operations a step takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from fmegatron.config import nearest_name
from fmegatron.errors import UserError
from fmegatron.models import PRESETS, DecoderConfig
from fmegatron.models.decoder import GATED

# Dense figures of the makers in TFLOP/s, without sparsity, by a part of the device's name: bf16, fp8.
PEAKS = {
    "B200": (2250.0, 4500.0),
    "H200": (989.0, 1979.0),
    "H100 PCIe": (756.0, 1513.0),
    "H100": (989.0, 1979.0),
    "A100": (312.0, 312.0),
}


@dataclass(frozen=True)
class Work:
    """A model and the batch of one step.

    batch: sequences; seq: tokens in each.
    """

    name: str
    config: DecoderConfig
    batch: int
    seq: int

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.batch * self.seq

    @property
    def flops(self) -> float:
        """Floating-point operations of one forward and backward (see `flops`)."""
        return flops(self.config, self.batch, self.seq)


def _decoder(layers: int, embed: int, heads: int, kv_heads: int, mlp: int, vocab: int, seq: int) -> DecoderConfig:
    return DecoderConfig(vocab=vocab, embed=embed, layers=layers, heads=heads, kv_heads=kv_heads, mlp=mlp, max_seq=seq)


WORKS = {
    "1.2b": Work("1.2b", _decoder(16, 2048, 16, 16, 8192, 32768, 4096), 4, 4096),
    "3b": Work("3b", _decoder(28, 3072, 24, 8, 8192, 32768, 4096), 4, 4096),
    "8b": Work("8b", PRESETS["llama3-8b"], 1, 8192),
    "gpt2-124m": Work("gpt2-124m", PRESETS["gpt2"], 16, 1024),
    "tiny": Work("tiny", PRESETS["tiny"], 4, 256),
}


def work_of(
    name: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    layers: int | None = None,
    fused: Sequence[str] = (),
) -> Work:
    """A work of this benchmark, or a preset with one sequence of at most 4096 tokens; with other sizes where given, and
    with products that are one (qkv, gate_up).

    Raises UserError for an unknown name, sizes below 1 and sequences longer than learned positions.
    """
    if name in WORKS:
        work = WORKS[name]
    elif name in PRESETS:
        work = Work(name, PRESETS[name], 1, min(PRESETS[name].max_seq, 4096))
    else:
        known = [*WORKS, *PRESETS]
        raise UserError(f"--model {name} is not known; did you mean {nearest_name(name, known)}?")
    for flag, value in (("--batch", batch), ("--seq", seq), ("--layers", layers)):
        if value is not None and value < 1:
            raise UserError(f"{flag} {value} must be 1 or more")
    config = work.config if layers is None else dataclasses.replace(work.config, layers=layers)
    if "gate_up" in fused and config.activation not in GATED:
        raise UserError(f"--fused gate_up: {name} has no gate (its activation is {config.activation}): leave it out")
    if fused:
        config = dataclasses.replace(config, fused_qkv="qkv" in fused, fused_gate_up="gate_up" in fused)
    seq = seq or work.seq
    if seq > config.max_seq:
        if config.positions == "learned":
            raise UserError(f"--seq {seq} is longer than the {config.max_seq} learned positions of {name}")
        config = dataclasses.replace(config, max_seq=seq)
    return Work(name, config, batch or work.batch, seq)


def matrix_parameters(config: DecoderConfig) -> int:
    """Elements of the matrices that a token meets: of the blocks and the output, not of the embedding, which is read."""
    attention = config.embed * config.head * 2 * (config.heads + config.kv_heads)
    feed_forward = (3 if config.activation in GATED else 2) * config.embed * config.mlp
    return config.layers * (attention + feed_forward) + config.embed * config.vocab


def flops(config: DecoderConfig, batch: int, seq: int) -> float:
    """Floating-point operations of one forward and backward: batch · seq · (6 · N + 6 · layers · seq · D), with N of
    `matrix_parameters` and D = heads · head.

    A multiply-add is 2; the backward is twice the forward. Attention is counted with its causal mask: a query sees
    seq / 2 keys on average (in a layer with a window, those that it sees), for 2 products of 2 · D, three times. Nothing
    is counted for recomputation, norms, activations, softmax or the optimizer (as in Chowdhery et al., "PaLM", 2022,
    appendix B, but for the mask).
    """
    window = min(config.window or seq, seq)
    seen = {"full": seq / 2, "window": window * (1 - window / (2 * seq))}
    keys = sum(seen[kind] for kind in config.kinds)
    return batch * seq * (6.0 * matrix_parameters(config) + 12.0 * config.heads * config.head * keys)


def stated_peak(device_name: str, precision: str) -> float | None:
    """FLOP/s that the maker states for a device, dense; None where it is not in PEAKS."""
    for part, (half, eighth) in PEAKS.items():
        if all(word in device_name for word in part.split()) and precision != "fp32":
            return 1e12 * (eighth if precision.startswith("fp8") else half)
    return None
