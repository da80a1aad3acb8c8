"""Which models there are, where they lie, and how a name becomes a folder. Imports no torch.

The cache folder is `PAGEWALK_CACHE`, or else the user's own cache folder (for example ~/.cache/pagewalk on Linux).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InvalidInput
from engine.models.tiny_tokenizer import TINY_DIR, TINY_HYBRID_DIR, TINY_SWA_DIR
from engine.models.tokenizer import read_json

TINY = "tiny"
TINY_SWA = "tiny-swa"
TINY_HYBRID = "tiny-hybrid"
SMOLLM2 = "smollm2-135m"

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

EMBEDDED = {TINY: TINY_DIR, TINY_SWA: TINY_SWA_DIR, TINY_HYBRID: TINY_HYBRID_DIR}
"""Models whose weights are part of the repository, and where they lie."""


@dataclass(frozen=True)
class ModelInfo:
    """One model that has a name here. `installed`: usable now, offline. `how_to_get`: a command, empty when there is nothing to do."""

    name: str
    description: str
    installed: bool
    how_to_get: str
    licence: str
    path: str


def cache_dir() -> Path:
    """The folder for pulled models; not created here."""
    from platformdirs import user_cache_dir

    named = os.environ.get("PAGEWALK_CACHE")
    return Path(named).expanduser() if named else Path(user_cache_dir("pagewalk", appauthor=False))


def smollm2_dir() -> Path:
    """Where the pulled SmolLM2 lies, or will lie."""
    return cache_dir() / "models" / SMOLLM2


def missing_files(folder: Path) -> list[str]:
    """Names of what a usable model folder still needs."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    return missing if any(folder.glob("*.safetensors")) else [*missing, "*.safetensors"]


def list_models() -> list[ModelInfo]:
    """The named models, the default first. Any other Hugging Face folder can be named by its path."""
    smollm2 = smollm2_dir()
    return [
        ModelInfo(
            TINY,
            "4 layers, one token per word; trained in this repository, knows a few public-domain passages by heart and nothing else",
            not missing_files(TINY_DIR),
            "",
            "Apache-2.0",
            str(TINY_DIR),
        ),
        ModelInfo(
            TINY_SWA,
            "6 layers, of which 4 see only the last 8 tokens; the words and passages of tiny, in three KV-cache groups",
            not missing_files(TINY_SWA_DIR),
            "",
            "Apache-2.0",
            str(TINY_SWA_DIR),
        ),
        ModelInfo(
            TINY_HYBRID,
            "6 layers, attention and Mamba2 in turn; the words and passages of tiny, in two KV-cache groups, one of them of recurrent states",
            not missing_files(TINY_HYBRID_DIR),
            "",
            "Apache-2.0",
            str(TINY_HYBRID_DIR),
        ),
        ModelInfo(
            SMOLLM2,
            "SmolLM2-135M-Instruct, 30 full-attention layers, 4-bit weights unpacked once; a real language model (93 MB to download)",
            not missing_files(smollm2),
            f"python -m engine.models pull {SMOLLM2}",
            "Apache-2.0",
            str(smollm2),
        ),
    ]


def resolve(name_or_path: str) -> tuple[str, Path]:
    """(name, absolute folder) of a named model or of a local model folder. Raises InvalidInput, saying what to do."""
    for info in list_models():
        if name_or_path == info.name:
            if not info.installed:
                remedy = f"get it with `{info.how_to_get}`" if info.how_to_get else f"restore engine/models/{info.name} from the repository"
                raise InvalidInput(f"The model {info.name} is not installed: {remedy}.")
            return info.name, Path(info.path).resolve()
    folder = Path(name_or_path).expanduser()
    if not name_or_path or not folder.is_dir():
        names = ", ".join(info.name for info in list_models())
        raise InvalidInput(
            f"There is no model named {name_or_path!r}: choose one of {names} (`python -m engine.models pull {SMOLLM2}` fetches the last one), "
            "or give the path of a local Hugging Face folder."
        )
    missing = missing_files(folder)
    if missing:
        raise InvalidInput(f"The model folder {name_or_path} lacks {' and '.join(missing)}: it needs config.json, tokenizer.json and *.safetensors.")
    architectures = read_json(folder / "config.json").get("architectures") or ["nothing"]
    if architectures[0] not in SUPPORTED_ARCHITECTURES:
        known = ", ".join(name.removesuffix("ForCausalLM") for name in SUPPORTED_ARCHITECTURES)
        raise InvalidInput(
            f"The model folder {name_or_path} has the architecture {architectures[0]}, which Pagewalk cannot run: bring one of {known} (…ForCausalLM)."
        )
    return folder.resolve().name, folder.resolve()
