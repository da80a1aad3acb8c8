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


SESSIONS = """
import threading, time
from scenarios import open_session
from scenarios.closeup import closeup_at
failures = []

def run(scene):
    session = open_session(scene)
    session.run_to_end()
    failures.extend([repr(session.error)] if session.error is not None else [])

def look():
    try:
        closeup_at("figure-6-v1", 20)
    except Exception as error:
        failures.append(repr(error))

threads = [threading.Thread(target=run, args=(scene,)) for scene in ("figure-6", "hybrid-state-live", "figure-6-v1")] + [threading.Thread(target=look)]
for thread in threads:
    thread.start()
    time.sleep(0.3)  # one after the other into what the first has only begun
for thread in threads:
    thread.join()
print(failures)
"""


def test_scenes_that_are_opened_while_the_first_one_still_loads_all_run():
    """A warm-up, two browsers and a close-up in the first second of a server: Python does not wait for a package whose import another thread has begun."""
    done = subprocess.run([sys.executable, "-c", SESSIONS], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"
    assert "Traceback" not in done.stderr
