"""What to call the KV-cache groups of a run, and how many tokens and slots their blocks have. Made from the trace's header alone."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any, NamedTuple

from engine.trace.frame import TraceHeader

LABELS: dict[str, tuple[str, str | None]] = {
    "full": ("full", None),
    "full_attention": ("full", None),
    "mla": ("MLA", None),
    "mla_attention": ("MLA", None),
    "sliding_window": ("window", "sliding_window"),
    "chunked_local": ("chunk", "attention_chunk_size"),
    "chunked_local_attention": ("chunk", "attention_chunk_size"),
    "mamba": ("Mamba", "mamba_cache_mode"),
    "rswa": ("R-SWA", "rswa_window"),
    "sink_full_attention": ("sink", "sink_len"),
    "cross_attention": ("encoder", None),
}
"""Kind of group -> its short name, and the field whose value tells two groups of the kind apart."""

TITLES: dict[str, str] = {
    "full": "full attention: every token attends to all before it",
    "MLA": "multi-head latent attention: one latent per token, managed like full attention",
    "window": "sliding window: a token attends to itself and the {value} tokens before it",
    "chunk": "chunked local attention: a token attends only within its chunk of {value} tokens",
    "Mamba": "Mamba: a block holds one recurrent state (mode {value})",
    "R-SWA": "the prompt stays in sight, of the generated tokens the last {value}",
    "sink": "full attention whose first {value} tokens stay for ever",
    "encoder": "keys and values of the encoder's output, never shared",
}


class Group(NamedTuple):
    """One KV-cache group. `label` is short (“window 8”) and unique within the run, `title` explains it; `block_size` in tokens; `is_state`: its blocks hold
    one recurrent state each and have no slots."""

    group_id: int
    label: str
    title: str
    block_size: int
    is_state: bool

    @property
    def noun(self) -> str:
        """The label as it stands in a sentence."""
        return "full attention" if self.label == "full" else self.label


def groups_of(header: TraceHeader) -> list[Group]:
    """The groups of a run in order; one full-attention group where the header names none. Never empty."""
    default = int(header.config.get("block_size") or 1)
    named = header.config.get("kv_cache_groups") or [{}]
    groups = [_group(group_id, described, default) for group_id, described in enumerate(named)]
    labels = [group.label for group in groups]
    return [g._replace(label=f"{g.label} ({g.group_id})") if labels.count(g.label) > 1 else g for g in groups]


def hash_block_size_of(header: TraceHeader) -> int:
    """Tokens per prefix hash (R2.6)."""
    return int(header.config.get("hash_block_size") or 0) or gcd(*(group.block_size for group in groups_of(header)))


def _group(group_id: int, described: Mapping[str, Any], default_block_size: int) -> Group:
    kind = str(described.get("kind") or described.get("type") or "full")
    name, field = LABELS.get(kind, (kind.replace("_", " "), None))
    value = described.get(field) if field else None
    shown = value - 1 if name == "window" and isinstance(value, int) else value
    explained = TITLES.get(name, name).format(value=shown)
    size = int(described.get("block_size") or default_block_size)
    return Group(group_id, f"{name} {value}" if value is not None else name, explained, size, kind == "mamba")
