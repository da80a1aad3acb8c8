"""Models: the embedded `tiny`, `tiny-swa` and `tiny-hybrid`, the larger `smollm2-135m` once pulled, or any local Hugging Face folder of a llama-like
architecture.

Importing this package imports neither torch nor transformers; `load_model` does when it is called. Pulled models lie in `PAGEWALK_CACHE` if that
environment variable is set, else in the user's cache folder (~/.cache/pagewalk on Linux). Nothing but `pull` goes online.
"""

from __future__ import annotations

from engine.models.catalog import ModelInfo, cache_dir, list_models
from engine.models.layer_groups import attention_layers_of, has_mamba_layers, kv_cache_groups_of, sliding_window_of, smallest_block_size_of
from engine.models.loader import LoadedModel, load_model, load_tokenizer, max_model_len_of, num_layers_of
from engine.models.tokenizer import Tokenizer

__all__ = [
    "LoadedModel",
    "ModelInfo",
    "Tokenizer",
    "attention_layers_of",
    "cache_dir",
    "has_mamba_layers",
    "kv_cache_groups_of",
    "list_models",
    "load_model",
    "load_tokenizer",
    "max_model_len_of",
    "num_layers_of",
    "sliding_window_of",
    "smallest_block_size_of",
]
