"""Runs scenes on real vLLM: the conformance oracle with the few operations that only scenes have. Needs the oracle's environment (tests/conformance/README.md).

Reads the list that `recording.py` makes on standard input, prints the recorded runs on standard output.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
import oracle_driver
from vllm.v1.core.sched import async_scheduler, scheduler


class SceneSim(oracle_driver.SchedSim):
    """One scene: `prepare` and `arrange` give the free queue another order, and `dcp` ranks share each block."""

    def build(self) -> None:
        size = self.sc.get("dcp", 1)
        made = {cls: cls.__init__ for cls in (scheduler.Scheduler, async_scheduler.AsyncScheduler)}
        original = scheduler.Scheduler.__init__

        def with_ranks(this: Any, vllm_config: Any, *rest: Any, **more: Any) -> None:
            vllm_config.parallel_config.decode_context_parallel_size = size
            original(this, vllm_config, *rest, **more)

        scheduler.Scheduler.__init__ = with_ranks
        try:
            super().build()
        finally:
            for cls, init in made.items():
                cls.__init__ = init

    def op_prepare(self, op: dict[str, Any]) -> dict[str, Any]:
        blocks = self.pool.get_new_blocks(len(op["ids"]))
        by_id = {block.block_id: block for block in blocks}
        self.pool.free_blocks([by_id[block_id] for block_id in op["ids"]])
        return {}

    def op_arrange(self, op: dict[str, Any]) -> dict[str, Any]:
        queue = self.pool.free_block_queue
        blocks = [self.pool.blocks[block_id] for block_id in op["ids"]]
        for block in blocks:
            queue.remove(block)
        queue.append_n(blocks)
        return {}


def main() -> None:
    results = []
    for scene in json.load(sys.stdin):
        steps: list[dict[str, Any]] = []
        SceneSim(scene).run(steps)
        results.append({"name": scene["name"], "steps": steps})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
