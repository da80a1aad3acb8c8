"""What real vLLM 0.27.0 does in the worker before a forward pass: its scheduler's plans through its own batch, block tables and Mamba code, on a CPU.

    PYTHONHASHSEED=0 ~/oracle/bin/python -m tests.conformance.worker_oracle tests/conformance/worker_runs.json.gz

records the runs that `test_worker_runs.py` compares with; `--seed` and `--count` ask for others. vLLM's own and unchanged are the scheduler,
`GPUModelRunner._update_states`, `InputBatch`, `MultiGroupBlockTable`, `max_num_blocks_per_req`, `preprocess_mamba` with its copy specifications,
`mamba_get_block_table_tensor`, `_compute_prefix_caching_block_indices` and `get_kv_cache_groups`. A stand-in takes the place of the model runner's object,
and of the copies the addresses are read instead of being copied. What MambaMixer2 does with the block indices in the mode `all` is read from its source.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # the oracle's driver is a script

import oracle_driver  # type: ignore[import-not-found]
import torch
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec, get_temporal_copy_spec  # type: ignore[import-not-found]
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder  # type: ignore[import-not-found]
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor  # type: ignore[import-not-found]
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups  # type: ignore[import-not-found]
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec  # type: ignore[import-not-found]
from vllm.v1.worker import gpu_model_runner, mamba_utils  # type: ignore[import-not-found]
from vllm.v1.worker.block_table import SlotMappingMode  # type: ignore[import-not-found]
from vllm.v1.worker.gpu_input_batch import InputBatch  # type: ignore[import-not-found]

from tests.conformance.worker_scenario import GROUP_QUESTIONS, Json, worker_scenario

MAX_TOKENS = 512
gpu_model_runner.get_pp_group = lambda: SimpleNamespace(is_last_rank=True)  # one process


class Worker:
    """The parts of a model runner that these functions ask for."""

    def __init__(self, sim: Any) -> None:
        scenario, self.config = sim.sc, sim.cfg
        specs = [group.kv_cache_spec for group in self.config.kv_cache_groups]
        self.max_model_len = scenario["max_model_len"]
        mode = next((spec.mamba_cache_mode for spec in specs if isinstance(spec, MambaSpec)), "none")
        vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(mamba_cache_mode=mode),
            model_config=SimpleNamespace(max_model_len=self.max_model_len),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        )
        self.states = [index for index, spec in enumerate(specs) if isinstance(spec, MambaSpec)]
        self.mode = mode
        sizes = [spec.block_size for spec in specs]
        self.input_batch = InputBatch(
            max_num_reqs=scenario["max_num_seqs"],
            max_model_len=self.max_model_len,
            max_num_batched_tokens=MAX_TOKENS,
            device=torch.device("cpu"),
            vocab_size=100,
            block_sizes=sizes,
            kernel_block_sizes=sizes,
            max_num_blocks_per_req=[spec.max_num_blocks_per_req(vllm_config, self.max_model_len) for spec in specs],
            slot_mapping_modes=[SlotMappingMode.NONE if index in self.states else SlotMappingMode.TOKEN_TO_KV_SLOT for index in range(len(specs))],
        )
        self.runner = SimpleNamespace(
            requests={},
            input_batch=self.input_batch,
            num_prompt_logprobs={},
            late_interaction_runner=SimpleNamespace(on_requests_finished=lambda _: None, register_request=lambda *_: None),
            speculative_config=None,
            is_pooling_model=False,
            uses_mrope=False,
            uses_xdrope_dim=0,
            use_async_spec_decode=False,
            use_async_scheduling=False,
            kv_caches=[],
            kv_cache_config=self.config,
            device=torch.device("cpu"),
            _on_request_state_removed=lambda *_: None,
            _zero_block_ids=lambda _: None,
            _process_encoder_cache_scheduler_output=lambda _: None,
            _may_reorder_batch=lambda _: None,  # backends put decodes first; which request sits in which row is theirs
        )
        self.mamba_state_idx: dict[str, int] = {}
        self.layers = {}
        for group in self.config.kv_cache_groups:
            for name in group.layer_names:
                conv, ssm = torch.zeros(self.config.num_blocks, 3, 2), torch.zeros(self.config.num_blocks, 4)
                self.layers[name] = SimpleNamespace(kv_cache=(conv, ssm))

    def widths(self) -> list[int]:
        return [table.max_num_blocks_per_req for table in self.input_batch.block_table.block_tables]

    def step(self, output: Any) -> Json:
        """Brings rows up to date and says what they are, and what happens to states."""
        gpu_model_runner.GPUModelRunner._update_states(self.runner, output)
        req_ids = list(self.input_batch.req_ids)
        said: Json = {
            "rows": [[self._row(index, table) for table in self.input_batch.block_table.block_tables] for index in range(len(req_ids))],
            "req_ids": req_ids,
        }
        if req_ids and self.states:
            computed = torch.tensor([self.runner.requests[name].num_computed_tokens for name in req_ids], dtype=torch.int32)
            ends = computed + torch.tensor([output.num_scheduled_tokens[name] for name in req_ids], dtype=torch.int32)
            said["computed"], said["ends"] = computed.tolist(), ends.tolist()
            said["states"] = {str(index): self._states(output, index, computed, ends) for index in self.states}
        return said

    @staticmethod
    def _row(index: int, table: Any) -> Json:
        length = int(table.num_blocks_per_row[index])
        everything = table.block_table.np[index].tolist()
        return {"ids": everything[:length], "behind": sum(1 for entry in everything[length:] if entry)}

    def _states(self, output: Any, group_id: int, computed: torch.Tensor, ends: torch.Tensor) -> list[Json]:
        """Per request of the batch the block that the state is taken from (null: there is none yet) and the blocks that states are left in, in order."""
        spec = self.config.kv_cache_groups[group_id].kv_cache_spec
        table = self.input_batch.block_table[group_id].block_table.cpu[: len(computed)]
        if self.mode == "all":
            common = SimpleNamespace(seq_lens=ends, compute_num_computed_tokens=lambda: computed)
            last_computed, first, last = BaseMambaAttentionMetadataBuilder._compute_prefix_caching_block_indices(None, common, spec.block_size)
            # MambaMixer2 reads the state at last_computed where tokens are computed, and leaves states in first..last-1 (full blocks) and in last.
            return [
                {
                    "source": int(row[last_computed[index]]) if computed[index] > 0 else None,
                    "left_in": row[int(first[index]) : int(last[index]) + 1].tolist(),
                }
                for index, row in enumerate(table)
            ]
        left_in = mamba_get_block_table_tensor(table, ends, spec, self.mode)[:, 0].tolist()
        copied = self._copies(output, group_id) if self.mode == "align" else {}
        return [
            {"source": copied.get(block_id, block_id) if computed[index] > 0 else None, "left_in": [block_id], "copied": block_id in copied}
            for index, block_id in enumerate(left_in)
        ]

    def _copies(self, output: Any, group_id: int) -> dict[int, int]:
        """What preprocess_mamba copies before the forward pass: destination to source, of this group; both kinds of state must agree."""
        spec = self.config.kv_cache_groups[group_id].kv_cache_spec
        buffers = SimpleNamespace(
            **{name: SimpleNamespace(np=[0] * 4096) for name in ("src_ptrs", "dst_ptrs", "sizes")}, mamba_group_ids=[group_id], mamba_spec=spec, offset=0
        )
        index_before = dict(self.mamba_state_idx)
        mamba_utils.do_mamba_copy_block = lambda _: None
        mamba_utils.preprocess_mamba(
            output,
            self.config,
            SimpleNamespace(enable_prefix_caching=True),
            self.mamba_state_idx,
            self.input_batch,
            self.runner.requests,
            self.layers,
            (get_conv_copy_spec, get_temporal_copy_spec),
            buffers,
        )
        if group_id != self.states[-1]:  # one dictionary serves all groups of a run; here each group asks by itself
            self.mamba_state_idx = index_before
        (name,) = self.config.kv_cache_groups[group_id].layer_names
        pairs: list[tuple[int, int]] = []
        for place in range(buffers.offset):
            state = self.layers[name].kv_cache[place % 2]
            width, base = state.stride(0) * state.element_size(), state.data_ptr()
            assert buffers.sizes.np[place] == width, "without speculation a whole state is copied"
            source, destination = ((int(pointers.np[place]) - base) / width for pointers in (buffers.src_ptrs, buffers.dst_ptrs))
            pairs.append((int(destination), int(source)))
        assert pairs[::2] == pairs[1::2], "convolution and SSM state are copied alike"
        assert len(dict(pairs)) == len(pairs) // 2, "nothing is written twice"
        return dict(pairs)


def record(scenario: Json) -> Json | None:
    """The scenario's operations, and what the worker did in each step; None for what vLLM refuses."""
    sim = oracle_driver.SchedSim(scenario)
    worker = Worker(sim)
    steps: list[Json] = []
    for op in scenario["ops"]:
        if op["op"] != "sched":
            getattr(sim, "op_" + op["op"])(op)
            continue
        sim.op_schedule_only(op)
        steps.append(worker.step(sim.fifo[-1]))
        sim.op_update_only(op)
    return {"scenario": scenario, "widths": worker.widths(), "steps": steps}


def answer(question: Json) -> Json:
    """The groups that vLLM makes of layers described by `worker_scenario`."""
    dtype = torch.float32
    specs: Json = {}
    for index, layer in enumerate(question["layers"]):
        sizes = {"block_size": layer["block_size"]}
        attention = {"num_kv_heads": layer.get("num_kv_heads"), "head_size": layer.get("head_size"), "dtype": dtype, **sizes}
        if layer["type"] == "full":
            spec = FullAttentionSpec(**attention)
        elif layer["type"] == "sliding_window":
            spec = SlidingWindowSpec(**attention, sliding_window=layer["sliding_window"])
        else:
            shapes = tuple(map(tuple, layer["shapes"]))
            spec = MambaSpec(**sizes, shapes=shapes, dtypes=(dtype,) * len(shapes), mamba_cache_mode=layer["mode"], page_size_padded=layer["page_size_padded"])
        specs[f"layers.{index}"] = spec
    config = SimpleNamespace(scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False))
    groups = get_kv_cache_groups(config, specs)
    return {
        **question,
        "groups": [[list(group.layer_names), group.kv_cache_spec.block_size, group.kv_cache_spec.page_size_bytes] for group in groups],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=27)
    parser.add_argument("--count", type=int, default=80)
    arguments = parser.parse_args()
    runs = [record(worker_scenario(arguments.seed, number)) for number in range(arguments.count)]
    recorded = {"runs": runs, "groups": [answer(question) for question in GROUP_QUESTIONS]}
    text = json.dumps(recorded, separators=(",", ":"))
    arguments.file.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(runs)} runs, {sum(len(run['steps']) for run in runs)} steps, {arguments.file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
