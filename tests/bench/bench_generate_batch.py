"""Tokens per second of the whole engine beside transformers' own continuous batching: `python -m tests.bench.bench_generate_batch`.

The same requests, greedy, with the same weights in one process on one thread, run about: one round of transformers (`generate_batch`'s manager, started
and run once before anything is timed), one of the engine without recorder, one as a session runs it, with every frame recorded and checked. Both sides must
choose the same tokens. CPU time is what is compared, because a busy machine disturbs it little; the time on the clock stands beside it. Models that are not
installed are replaced by random weights of their shape, which cost the same time.

Two more tables: what one interpreted layer adds to a step, and a step of the embedded models with every layer interpreted.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import ContinuousBatchingConfig, Gemma3ForCausalLM, Gemma3TextConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from engine.core.output import SamplingParams
from engine.errors import PagewalkError
from engine.models import load_model
from engine.models.catalog import EMBEDDED
from engine.models.tiny_tokenizer import TINY_DIR
from engine.session import InterpretedLayers, Session
from engine.session_config import RequestSpec, SessionConfig
from engine.trace.events import EngineFailed, TokenSampled
from tests.bench.bench_worker import SMOLLM2_SHAPE

GOAL = 1.0
GOAL_INTERPRETED_LAYER = 30.0
GOAL_TINY = 80.0
BATCHES = (1, 4, 8)
NUM_PROMPT_TOKENS = 32
NUM_NEW_TOKENS = 32
NUM_ROUNDS = 3
BLOCK_SIZE = 16
MAX_NUM_BATCHED_TOKENS = 64
GEMMA3_SHAPE = {
    "vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 256, "sliding_window": 512, "max_position_embeddings": 32768,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """`folder`: what a session loads it by; `peer`: the same weights with transformers' own attention."""

    label: str
    folder: str
    peer: PreTrainedModel


@dataclass
class Times:
    """Seconds of each round, and the tokens that it chose, per request."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)

    def measure(self, run: Callable[[], list[list[int]]]) -> None:
        """Time one round; it must choose what the rounds before it have chosen."""
        cpu, wall = time.process_time(), time.perf_counter()
        tokens = run()
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)
        assert self.tokens in ([], tokens)
        self.tokens = tokens

    def __format__(self, spec: str) -> str:
        cpu, wall = (sum(map(len, self.tokens)) / statistics.median(seconds) for seconds in (self.cpu, self.wall))
        return f"{f'{cpu:.1f} ({wall:.1f})':>18}"

    def __truediv__(self, other: Times) -> float:
        """How much faster this side is, by CPU time."""
        return statistics.median(other.cpu) / statistics.median(self.cpu)


@contextlib.contextmanager
def model_or_shape(name: str) -> Iterator[Model]:
    """The installed model, or random weights of its shape in a folder of their own."""
    with TemporaryDirectory() as folder:
        label = name
        try:
            load_model(name)
            where = name
        except PagewalkError:
            label, where = f"{name} (shape)", folder
            torch.manual_seed(0)
            SHAPES[name]().save_pretrained(folder)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (Path(folder) / file).write_bytes((TINY_DIR / file).read_bytes())
        model = load_model(where).model
        yield Model(label, where, with_own_attention(model))


def with_own_attention(model: PreTrainedModel) -> PreTrainedModel:
    """A second model object over the same weights."""
    twin = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    twin.set_attn_implementation("sdpa")
    return twin


def prompts(batch: int) -> list[list[int]]:
    return [[5 + (31 * i + 7 * t) % 90 for t in range(NUM_PROMPT_TOKENS)] for i in range(batch)]


@contextlib.contextmanager
def continuous_batching(model: PreTrainedModel) -> Iterator[Callable[[list[list[int]]], list[list[int]]]]:
    """transformers' manager, running; what is yielded answers one round of prompts."""
    generation = GenerationConfig(do_sample=False, max_new_tokens=NUM_NEW_TOKENS, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(page_size=BLOCK_SIZE, num_blocks=64, max_batch_tokens=MAX_NUM_BATCHED_TOKENS, allow_block_sharing=False)
    with (
        torch.inference_mode(),
        model.continuous_batching_context_manager(generation_config=generation, continuous_batching_config=config, warmup=False) as manager,
    ):

        def answer(inputs: list[list[int]]) -> list[list[int]]:
            request_ids = manager.add_requests(inputs, max_new_tokens=NUM_NEW_TOKENS)
            found: dict[str, list[int]] = {}
            while len(found) < len(inputs):
                result = manager.get_result(timeout=60)
                assert result is not None
                assert result.error is None, result.error
                if result.is_finished():
                    found[result.request_id] = list(result.generated_tokens)
            return [found[request_id] for request_id in request_ids]

        yield answer


class Silent(Session):
    """A session of which only scheduler and worker are used, with nobody to tell."""

    _emit = None  # type: ignore[assignment]


def session(kind: type[Session], model_name: str, inputs: list[list[int]], layers: InterpretedLayers) -> Session:
    """A person's run with the default settings, so that a small pool's kernels are watched, and all requests there from the start. Its runner stands ready:
    making one fills the pool with zeros, and transformers' manager has made its own."""
    requests = tuple(RequestSpec(f"R{i}", tuple(prompt), SamplingParams(max_tokens=NUM_NEW_TOKENS)) for i, prompt in enumerate(inputs))
    config = SessionConfig(num_blocks=256, block_size=BLOCK_SIZE, max_num_seqs=len(inputs), max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS)
    made = kind(config, requests, vocabulary=str, model_name=model_name, interpreted_layers=layers)
    runner = made._runner_choice.make(made._emit)
    made._runner_choice.make = lambda emit: runner  # type: ignore[method-assign]
    return made


def recorded(made: Session) -> list[list[int]]:
    """Run to the end; the tokens come from the frames."""
    chosen: dict[str, list[int]] = {spec.request_id: [] for spec in made._inputs["requests"]}
    for frame in made.run_to_end().frames:
        assert not isinstance(frame.event, EngineFailed), frame.event
        if isinstance(frame.event, TokenSampled):
            chosen[str(frame.event.request_id)].append(frame.event.token_id)
    return list(chosen.values())


def unrecorded(made: Session) -> list[list[int]]:
    """The engine's loop around scheduler and worker."""
    scheduler, runner = made._scheduler, made._runner_choice.make(made._emit)
    requests = [made._make_request(spec) for spec in made._inputs["requests"]]
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        scheduler.update_from_output(output, runner.execute_model(output))
    return [list(request.output_token_ids) for request in requests]


def compare(model: Model, batch: int, num_rounds: int) -> tuple[Times, Times, Times]:
    """transformers, the engine unrecorded, the session."""
    inputs = prompts(batch)
    times = theirs, silent, told = Times(), Times(), Times()
    with continuous_batching(model.peer) as answer:
        answer(inputs)
        unrecorded(session(Silent, model.folder, inputs, ()))
        for _ in range(num_rounds):
            theirs.measure(lambda: answer(inputs))
            silent.measure(functools.partial(unrecorded, session(Silent, model.folder, inputs, ())))
            told.measure(functools.partial(recorded, session(Session, model.folder, inputs, ())))
    assert silent.tokens == told.tokens
    return times


def step_milliseconds(model_name: str, batch: int, layers: InterpretedLayers) -> float:
    """CPU time of a recorded step, median over a run."""
    made, times = session(Session, model_name, prompts(batch), layers), []
    while True:
        begin = time.process_time()
        if not made.advance():
            break
        times.append(1000 * (time.process_time() - begin))
    assert made.complete, made.error
    return statistics.median(times)


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description="Tokens per second beside transformers' continuous batching.")
    parser.add_argument("--model", choices=SHAPES, action="append", help="may be given several times; default: all")
    parser.add_argument("--batch", type=int, action="append", help=f"requests at once; default: {', '.join(map(str, BATCHES))}")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    logging.get_logger("ContinuousBatchingLogger").setLevel("CRITICAL")  # it asks for a package that only measures memory
    print(f"{NUM_PROMPT_TOKENS} prompt tokens and {NUM_NEW_TOKENS} new ones per request; tokens/s of CPU time (on the clock)")
    print(f"{'model':<28}{'batch':>6}{'transformers':>18}{'engine':>18}{'ratio':>7}{'as recorded':>18}{'ratio':>7}   tokens")
    extra = []
    for name in arguments.model or SHAPES:
        with model_or_shape(name) as model:
            for batch in arguments.batch or BATCHES:
                theirs, silent, told = compare(model, batch, arguments.rounds)
                line = f"{model.label:<28}{batch:>6}{theirs}{silent}{silent / theirs:>7.2f}{told}{told / theirs:>7.2f}"
                print(f"{line}   {same_tokens(theirs, silent)}   goal >= {GOAL}: {reached(silent / theirs >= GOAL)}", flush=True)
                plain, one = (statistics.median(step_milliseconds(model.folder, batch, layers) for _ in range(arguments.rounds)) for layers in ((), (0,)))
                verdict = f"goal <= {GOAL_INTERPRETED_LAYER:.0f}: {reached(one - plain <= GOAL_INTERPRETED_LAYER)}"
                extra.append(f"{model.label:<28}{batch:>6}{plain:>10.1f}{one:>10.1f}{one - plain:>8.1f}   {verdict}")
    print(f"\nCPU milliseconds of a recorded step\n{'model':<28}{'batch':>6}{'torch':>10}{'1 layer':>10}{'added':>8}")
    print("\n".join(extra))
    print(f"\n{'all layers interpreted':<28}{'batch':>6}{'ms':>10}")
    for name in EMBEDDED:
        for batch in arguments.batch or BATCHES:
            every = statistics.median(step_milliseconds(name, batch, "all") for _ in range(arguments.rounds))
            print(f"{name:<28}{batch:>6}{every:>10.1f}   goal < {GOAL_TINY:.0f}: {reached(every < GOAL_TINY)}", flush=True)


def same_tokens(a: Times, b: Times) -> str:
    same = sum(x == y for mine, other in zip(a.tokens, b.tokens, strict=True) for x, y in zip(mine, other, strict=True))
    return f"{same} of {sum(map(len, a.tokens))} the same"


def reached(yes: bool) -> str:
    return "reached" if yes else "missed"


SHAPES: dict[str, Callable[[], PreTrainedModel]] = {
    "smollm2-135m": lambda: LlamaForCausalLM(LlamaConfig(**SMOLLM2_SHAPE)),
    "gemma3-270m": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA3_SHAPE)),
}


if __name__ == "__main__":
    main()
