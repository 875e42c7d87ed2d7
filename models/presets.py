"""The published sizes of all families, by name."""

from __future__ import annotations

from fmegatron.models.config import DecoderConfig
from fmegatron.models.gemma import GEMMA
from fmegatron.models.gpt import GPT
from fmegatron.models.llama import LLAMA
from fmegatron.models.mistral import MISTRAL
from fmegatron.models.olmo import OLMO
from fmegatron.models.phi import PHI
from fmegatron.models.qwen import QWEN

PRESETS: dict[str, DecoderConfig] = {**LLAMA, **GPT, **MISTRAL, **QWEN, **GEMMA, **PHI, **OLMO}
