"""Which architectures can run here, and what of a supported one cannot. Reads config.json only; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Architectures whose attention layers take a registered attention function and need nothing else from it (no soft-capping, no attention sinks), and
# whose other layers, if any, are Mamba2 layers as Bamba has them.
SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "GemmaForCausalLM",
    "Gemma3ForCausalLM",
    "SmolLM3ForCausalLM",
    "BambaForCausalLM",
)

_REASONS = {
    "Gemma2ForCausalLM": "it caps its attention scores, which our kernels do not",
    "GptOssForCausalLM": "it has attention sinks, which our kernels do not know",
    "Gemma3ForConditionalGeneration": "it reads images; its text model alone is a Gemma3ForCausalLM",
}
"""Why not, for those that people are most likely to try."""


def unsupported(config: Mapping[str, Any]) -> str | None:
    """Why a model with this config.json cannot run here, as the end of a sentence that begins with the model; None: it can."""
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if architecture is None:
        return f"says no architecture in its config.json: bring one of {_known()}"
    if architecture not in SUPPORTED_ARCHITECTURES:
        whole_input = "it has an encoder, which reads its whole input before the first token" if config.get("is_encoder_decoder") else ""
        reason = whole_input or _REASONS.get(str(architecture), "")
        return f"has the architecture {architecture}, which Pagewalk cannot run{f' ({reason})' if reason else ''}: bring one of {_known()}"
    if config.get("attn_logit_softcapping") is not None:
        return f"caps its attention scores (attn_logit_softcapping), which Pagewalk cannot run: bring one of {_known()} without it"
    if config.get("quantization_config"):
        return f"has quantized weights (quantization_config), but the kernels compute with plain ones: bring one of {_known()} in float32, float16 or bfloat16"
    if config.get("use_bidirectional_attention"):
        return f"lets tokens see later ones (use_bidirectional_attention), which a KV cache cannot serve: bring one of {_known()} without it"
    return None


def _known() -> str:
    return ", ".join(name.removesuffix("ForCausalLM") for name in SUPPORTED_ARCHITECTURES) + " (…ForCausalLM)"
