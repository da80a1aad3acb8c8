"""Which models there are, where they lie, and how a name becomes a folder. Imports no torch.

The cache folder is `PAGEWALK_CACHE`, or else the user's own cache folder (for example ~/.cache/pagewalk on Linux).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InvalidInput
from engine.models.supported import unsupported
from engine.models.terms import GEMMA_TERMS
from engine.models.tiny_tokenizer import TINY_DIR, TINY_HYBRID_DIR, TINY_SWA_DIR
from engine.models.tokenizer import read_json

TINY = "tiny"
TINY_SWA = "tiny-swa"
TINY_HYBRID = "tiny-hybrid"
SMOLLM2 = "smollm2-135m"
GEMMA3 = "gemma3-270m"

EMBEDDED = {TINY: TINY_DIR, TINY_SWA: TINY_SWA_DIR, TINY_HYBRID: TINY_HYBRID_DIR}
"""Models whose weights are part of the repository, and where they lie."""


@dataclass(frozen=True)
class ModelInfo:
    """One model that has a name here. `installed`: usable now, offline. `how_to_get`: a command, empty when there is nothing to do.

    `licence`: its name; `terms_address`: where terms stand that somebody must accept before the pull, empty when there are none.
    """

    name: str
    description: str
    installed: bool
    how_to_get: str
    licence: str
    path: str
    terms_address: str = ""


def cache_dir() -> Path:
    """The folder for pulled models; not created here."""
    from platformdirs import user_cache_dir

    named = os.environ.get("PAGEWALK_CACHE")
    return Path(named).expanduser() if named else Path(user_cache_dir("pagewalk", appauthor=False))


def pulled_dir(name: str) -> Path:
    """Where the pulled model of this name lies, or will lie."""
    return cache_dir() / "models" / name


def missing_files(folder: Path) -> list[str]:
    """Names of what a usable model folder still needs."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    return missing if any(folder.glob("*.safetensors")) else [*missing, "*.safetensors"]


def list_models() -> list[ModelInfo]:
    """The named models, the default first. Any other Hugging Face folder can be named by its path."""
    smollm2, gemma3 = pulled_dir(SMOLLM2), pulled_dir(GEMMA3)
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
        ModelInfo(
            GEMMA3,
            "Gemma 3 270M, 18 layers, of which 15 see only the last 512 tokens, in six KV-cache groups; 4-bit weights unpacked once (238 MB to download)",
            not missing_files(gemma3),
            f"python -m engine.models pull {GEMMA3}",
            GEMMA_TERMS.name,
            str(gemma3),
            GEMMA_TERMS.address,
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
            f"There is no model named {name_or_path!r}: choose one of {names} "
            f"(`python -m engine.models pull {SMOLLM2}` and `pull {GEMMA3}` fetch the last two), or give the path of a local Hugging Face folder."
        )
    config = folder / "config.json"
    reason = unsupported(read_json(config)) if config.is_file() else None  # said first: no other file would help
    if reason:
        raise InvalidInput(f"The model folder {name_or_path} {reason}.")
    missing = missing_files(folder)
    if missing:
        raise InvalidInput(f"The model folder {name_or_path} lacks {' and '.join(missing)}: it needs config.json, tokenizer.json and *.safetensors.")
    return folder.resolve().name, folder.resolve()
