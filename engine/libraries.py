"""Loading torch and transformers: seconds of work, done when a model is first wanted, by one thread at a time."""

from __future__ import annotations

import importlib
import threading

_lock = threading.RLock()
_NAMES = ("AttentionInterface", "AutoModelForCausalLM", "PreTrainedModel", "PreTrainedTokenizerFast")


def load_libraries() -> None:
    """Import torch and what we need of transformers; the second call costs nothing.

    transformers loads its parts when somebody first asks for a name of theirs. Two threads that do so at once (a warm-up and a screen, say) can meet it half
    loaded, and one of them is then told that it has no such name. So this is called before anything of `engine.worker` is imported: the package calls it, too,
    but Python lets a second thread import a module of a package whose own import has only begun."""
    with _lock:
        importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
        for name in _NAMES:
            getattr(transformers, name)
