"""Numbers that the PagedAttention paper reports (Kwon et al., SOSP 2023). None is used in a computation; screens show them beside ours, with their source.

How a number got here is part of it: read in the paper's text, taken from third parties who read it off a figure, or from memory without a source found. The
last are unconfirmed, and a screen marks them so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.paper.reservation import System

Reading = Literal["text", "third party", "memory"]
Part = Literal["token_states", "reservation", "internal", "external"]
PART_NAMES: dict[Part, str] = {
    "token_states": "Token states",
    "reservation": "Reservation",
    "internal": "Internal fragmentation",
    "external": "External fragmentation & others",
}


@dataclass(frozen=True)
class Quoted:
    """A reported number. `source`: where it stands; `unit` as printed behind it; `note`: what it is, where that is not plain."""

    value: float
    source: str
    reading: Reading = "text"
    unit: str = ""
    note: str = ""

    @property
    def unconfirmed(self) -> bool:
        """Nobody could be found who printed it."""
        return self.reading == "memory"

    @property
    def label(self) -> str:
        """For a screen: the source, and how the number was read where it does not stand in the text."""
        suffix = {"text": "", "third party": ", read off by third parties", "memory": ", unconfirmed"}[self.reading]
        return f"paper, {self.source}{suffix}"


def _percent(value: float, source: str, reading: Reading) -> Quoted:
    return Quoted(value, source, reading, " %")


FIGURE_1: dict[str, Quoted] = {
    "parameters_bytes": Quoted(26e9, "Figure 1", unit=" B", note="parameters of a 13B model"),
    "parameters": Quoted(65.0, "Figure 1", unit=" %", note="of an A100 with 40 GB"),
    "kv_cache": Quoted(30.0, "Figure 1", unit=" %", note="more than this"),
    "batch_existing": Quoted(8, "Figure 1", "third party", " requests", "about; where existing systems reach the memory's limit"),
    "batch_vllm": Quoted(40, "Figure 1", "third party", " requests", "about; where vLLM does"),
    "throughput_existing": Quoted(300, "Figure 1", "third party", " tokens/s", "about"),
    "throughput_vllm": Quoted(900, "Figure 1", "third party", " tokens/s", "about"),
}

FIGURE_2: dict[System, dict[Part, Quoted]] = {
    "orca_max": {
        "token_states": _percent(20.4, "Figure 2", "text"),
        "reservation": _percent(13.3, "Figure 2", "memory"),
        "internal": _percent(57.3, "Figure 2", "third party"),
        "external": Quoted(8.9, "Figure 2", "memory", " %", "seven chunks of 2,048 leave 1,392 of 15,728 slots, which is 8.85 %"),
    },
    "orca_pow2": {
        "token_states": _percent(26.8, "Figure 2", "memory"),
        "reservation": _percent(17.9, "Figure 2", "third party"),
        "internal": _percent(13.6, "Figure 2", "memory"),
        "external": _percent(41.6, "Figure 2", "third party"),
    },
    "orca_oracle": {
        "token_states": _percent(38.2, "Figure 2", "text"),
        "reservation": _percent(25.2, "Figure 2", "third party"),
        "external": _percent(36.6, "Figure 2", "third party"),
    },
    "paged": {"token_states": _percent(96.3, "Figure 2", "third party")},
}
"""Percent of the KV cache. Oracle's bar has no internal part; of vLLM's only the largest part carries a number, so that 3.7 % are left for all others."""

FIGURE_11: dict[str, dict[str, Quoted]] = {
    "sharegpt": {"prompt": Quoted(161.31, "Figure 11", "third party", " tokens"), "output": Quoted(337.99, "Figure 11", "third party", " tokens")},
    "alpaca": {"prompt": Quoted(19.31, "Figure 11", "third party", " tokens"), "output": Quoted(58.45, "Figure 11", "third party", " tokens")},
}
"""Mean lengths."""


def _figure_13(*values: float) -> dict[System, Quoted]:
    names: tuple[System, ...] = ("orca_max", "orca_pow2", "orca_oracle", "paged")
    return {name: Quoted(value, "Figure 13", "third party", " requests") for name, value in zip(names, values, strict=True)}


FIGURE_13: dict[str, dict[System, Quoted]] = {"sharegpt": _figure_13(7.00, 9.81, 13.62, 30.42), "alpaca": _figure_13(7.00, 43.24, 72.75, 132.44)}
"""Mean number of batched requests, OPT-13B."""

FIGURE_15: dict[str, dict[int, Quoted]] = {
    "parallel_sampling": {
        2: _percent(6.09, "Figure 15a", "third party"),
        4: _percent(8.53, "Figure 15a", "memory"),
        6: _percent(9.79, "Figure 15a", "third party"),
    },
    "beam_search": {
        2: _percent(37.56, "Figure 15b", "third party"),
        4: _percent(53.13, "Figure 15b", "third party"),
        6: _percent(55.16, "Figure 15b", "third party"),
    },
}
"""Blocks saved by sharing, by the number of outputs or the beam width: OPT-13B on Alpaca."""

SHARING_RANGES: dict[str, dict[str, tuple[Quoted, Quoted]]] = {
    "parallel_sampling": {
        "alpaca": (_percent(6.1, "section 6.3", "text"), _percent(9.8, "section 6.3", "text")),
        "sharegpt": (_percent(16.2, "section 6.3", "text"), _percent(30.5, "section 6.3", "text")),
    },
    "beam_search": {
        "alpaca": (_percent(37.6, "section 6.3", "text"), _percent(55.2, "section 6.3", "text")),
        "sharegpt": (_percent(44.3, "section 6.3", "text"), _percent(66.3, "section 6.3", "text")),
    },
}
PROMPT_SHARE = Quoted(12.0, "section 6.3", unit=" %", note="of the KV memory holds prompts in the parallel-sampling test")

FIGURE_16: dict[int, Quoted] = {
    80: Quoted(1.67, "Figure 16", unit=" times", note="the throughput of Orca (Oracle); 1 example in the prefix"),
    341: Quoted(3.58, "Figure 16", unit=" times", note="the throughput of Orca (Oracle); 5 examples in the prefix"),
}
"""By tokens of the shared prefix."""

KERNEL_SLOWDOWN = (Quoted(20, "Figure 18a", unit=" %"), Quoted(26, "Figure 18a", unit=" %"))
"""The paged attention kernel against FasterTransformer's: contexts of 64, 128 and 256 tokens, batches of 8 and 32."""

BLOCK_SIZE_NOTES: dict[str, str] = {
    "sharegpt": "Figure 18b: on ShareGPT, block sizes from 16 to 128 are best.",
    "alpaca": "Figure 18b: on Alpaca, 16 and 32 do well; larger blocks are clearly worse, because sequences are shorter than a block.",
    "default": "The paper settles on 16.",
}
DEFAULT_BLOCK_SIZE = Quoted(16, "section 7.2", unit=" tokens")
RECOMPUTE_NOTE = (
    "Figure 19: swapping is slow with small blocks; recomputation takes the same time with every block size and is never over 20 % above swapping; "
    "from 16 to 64 the two are alike."
)

TABLE_1: dict[str, dict[str, Quoted]] = {
    name: {
        "gpu_gb": Quoted(gpu, "Table 1", unit=" GB"),
        "parameters_gb": Quoted(parameters, "Table 1", unit=" GB"),
        "kv_cache_gb": Quoted(kv_cache, "Table 1", unit=" GB"),
        "num_slots": Quoted(slots, "Table 1", unit=" slots"),
    }
    for name, gpu, parameters, kv_cache, slots in (
        ("OPT-13B", 40, 26, 12, 15_700),
        ("OPT-66B", 160, 132, 21, 9_700),
        ("OPT-175B", 640, 346, 264, 60_100),
    )
}
"""What the paper ran: total GPU memory, parameters, memory left for the KV cache, and how many token slots that makes."""

KV_BYTES_PER_TOKEN = Quoted(800, "section 3", unit=" KB", note="OPT-13B")
KV_BYTES_PER_REQUEST = Quoted(1.6, "section 3", unit=" GB", note="OPT-13B, 2,048 tokens")
THROUGHPUT_GAIN = (Quoted(2, "section 6", unit=" times"), Quoted(4, "section 6", unit=" times"))
"""vLLM against the state of the art of 2023 (FasterTransformer, Orca) at the same latency."""
BLOG_KV_BYTES_PER_REQUEST = Quoted(1.7, "vLLM's blog post of June 2023", unit=" GB", note="LLaMA-13B, one sequence")
BLOG_WASTE = (Quoted(60, "vLLM's blog post of June 2023", unit=" %"), Quoted(80, "vLLM's blog post of June 2023", unit=" %"))
"""Of memory wasted by existing systems; with PagedAttention under 4 %."""
