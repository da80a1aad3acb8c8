"""A warm-up in the background and a screen may want torch and transformers in the same second."""

from __future__ import annotations

import subprocess
import sys

THREADS = """
import importlib, threading
failures = []

def run(what):
    try:
        what()
    except BaseException as error:
        failures.append(repr(error))

def load():
    from engine.models import load_model
    load_model("tiny")

wanted = [lambda: importlib.import_module("engine.worker.model_runner"), load, lambda: importlib.import_module("engine.worker.closeup")]
threads = [threading.Thread(target=run, args=(what,)) for what in wanted]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(failures)
"""


def test_threads_that_load_the_libraries_at_once_all_get_them():
    """Without `engine.libraries` one of them is told that transformers has no AutoModelForCausalLM."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"
