"""The operations of a model that torch has not, or not with this memory: each right in every precision, eager and
compiled, under torch.func, and (where they mix or index along a dim) under `sh`."""

from fmegatron.primitives.activation import clamped_swiglu, geglu, gelu, quick_gelu, relu2, swiglu
from fmegatron.primitives.attention import attention, cu_seqlens_of, segments_of
from fmegatron.primitives.cross_entropy import cross_entropy, linear_cross_entropy
from fmegatron.primitives.dropout import dropout, jittered
from fmegatron.primitives.embedding import embedding
from fmegatron.primitives.gated_mlp import gated_mlp, has_kernel
from fmegatron.primitives.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fmegatron.primitives.rotary import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    ProportionalScaling,
    YaRNScaling,
    apply_rotary,
    apply_rotary_both,
    rotary,
    rotary_table,
    split_qkv,
    split_rotary,
)
from fmegatron.primitives.rotary_attention import has_rotary_attention, rotary_attention

__all__ = [
    "DynamicNTKScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRoPEScaling",
    "ProportionalScaling",
    "YaRNScaling",
    "add_layer_norm",
    "add_rms_norm",
    "apply_rotary",
    "apply_rotary_both",
    "attention",
    "clamped_swiglu",
    "cross_entropy",
    "cu_seqlens_of",
    "dropout",
    "embedding",
    "gated_mlp",
    "geglu",
    "gelu",
    "has_kernel",
    "has_rotary_attention",
    "jittered",
    "layer_norm",
    "linear_cross_entropy",
    "quick_gelu",
    "relu2",
    "rms_norm",
    "rotary",
    "rotary_attention",
    "rotary_table",
    "segments_of",
    "split_qkv",
    "split_rotary",
    "swiglu",
]
