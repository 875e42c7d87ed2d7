"""The published sizes of all families, by name."""

from __future__ import annotations

from fmegatron.models.config import DecoderConfig
from fmegatron.models.deepseek import DEEPSEEK
from fmegatron.models.gemma import GEMMA
from fmegatron.models.gpt import GPT
from fmegatron.models.gpt_oss import GPT_OSS
from fmegatron.models.llama import LLAMA
from fmegatron.models.mistral import MISTRAL
from fmegatron.models.mixtral import MIXTRAL
from fmegatron.models.olmo import OLMO
from fmegatron.models.olmoe import OLMOE
from fmegatron.models.phi import PHI
from fmegatron.models.qwen import QWEN
from fmegatron.models.qwen_moe import QWEN_MOE

DENSE: dict[str, DecoderConfig] = {**LLAMA, **GPT, **MISTRAL, **QWEN, **GEMMA, **PHI, **OLMO}
PRESETS: dict[str, DecoderConfig] = {**DENSE, **MIXTRAL, **QWEN_MOE, **OLMOE, **GPT_OSS, **DEEPSEEK}
