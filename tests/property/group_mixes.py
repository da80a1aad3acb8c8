"""Random KV-cache groups: every type alone, and up to four mixed, with equal and different block sizes and hashes finer than blocks."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from hypothesis import strategies as st

from engine.core.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

MAX_MODEL_LEN = 40
BLOCK_SIZES = (1, 2, 2, 4, 4, 8)


@dataclass(frozen=True)
class Mix:
    """Groups and how prefixes are hashed; sizes None: as the engine chooses them."""

    groups: list[KVCacheGroupSpec]
    hash_block_size: int | None
    use_eagle: bool
    retention_interval: int | None

    @property
    def specs(self) -> list[KVCacheSpec]:
        return [group.kv_cache_spec for group in self.groups]

    @property
    def num_for_one_token(self) -> int:
        """Blocks that a request of one token takes."""
        spec_blocks = sum(spec.num_speculative_blocks for spec in self.specs if isinstance(spec, MambaSpec))
        return len(self.groups) + spec_blocks + sum(spec.sink_len // spec.block_size for spec in self.specs if isinstance(spec, SinkFullAttentionSpec))


KINDS = ("full", "full", "mla", "swa", "swa", "chunked", "all", "align", "align", "none", "rswa", "sink")


@st.composite
def specs(draw: st.DrawFn, kind: str | None = None, block_size: int | None = None, kinds: tuple[str, ...] = KINDS) -> KVCacheSpec:
    """One spec; `kind` and `block_size` None: any, of `kinds`."""
    kind = kind or draw(st.sampled_from(kinds))
    size = block_size or draw(st.sampled_from(BLOCK_SIZES))
    if kind == "full":
        return FullAttentionSpec(size)
    if kind == "mla":
        return MLAAttentionSpec(size)
    if kind == "swa":
        return SlidingWindowSpec(size, sliding_window=draw(st.integers(1, 12)))
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(size, attention_chunk_size=draw(st.sampled_from([6, 10, 8, 3, 12, 5, 1])))
    if kind == "rswa":
        return RSWASpec(size, rswa_window=draw(st.integers(1, 8)))
    if kind == "sink":
        return SinkFullAttentionSpec(size, sink_len=size * draw(st.integers(1, 2)))
    return MambaSpec(MAX_MODEL_LEN if kind == "none" else size, mamba_cache_mode=kind, num_speculative_blocks=draw(st.sampled_from([0, 0, 1, 2])))


@st.composite
def mixes(draw: st.DrawFn, enable_caching: bool, kinds: tuple[str, ...] = KINDS) -> Mix:
    """Mixes that the engine may still refuse (InvalidInput): not every combination exists. Two kinds are drawn more often than chance would: hits that end
    inside blocks, and one type alone."""
    theme = draw(st.sampled_from(["any", "any", "inside blocks", "inside blocks", "alone", "alone"]))
    if theme == "inside blocks" and enable_caching and "align" in kinds:
        return draw(mixes_with_hits_inside_blocks())
    if theme == "alone":
        kind = draw(st.sampled_from(sorted(set(kinds))))
        return Mix([KVCacheGroupSpec(["layer"], draw(specs(kind, draw(st.sampled_from([2, 4, 4])))))], None, False, None)
    num_groups = draw(st.sampled_from([1, 1, 2, 2, 2, 3, 4]))
    equal = draw(st.sampled_from([None, None, *BLOCK_SIZES]))
    fixed: list[str | None] = [None] * num_groups
    if num_groups > 1 and "align" in kinds and draw(st.booleans()):  # where hits end inside blocks: states at chunk ends beside full attention (R6.1)
        fixed[:2] = ["full", "align"]
    chosen = [draw(specs(kind, equal, kinds)) for kind in fixed]
    sizes = [spec.block_size for spec in chosen]
    finest = gcd(*sizes)
    hash_block_size = draw(st.sampled_from([None, *(size for size in (1, 2, 4, 8) if finest % size == 0)])) if num_groups > 1 else None
    can_retain = enable_caching and any(isinstance(spec, SlidingWindowSpec | MambaSpec) for spec in chosen)
    interval = draw(st.sampled_from([None, None, None, 0, 1, 2])) if can_retain else None
    scheduler_block_size = 1
    for size in sizes:
        scheduler_block_size = scheduler_block_size * size // gcd(scheduler_block_size, size)
    return Mix(
        [KVCacheGroupSpec([f"layer.{index}"], spec, draw(st.sampled_from([False, False, False, True]))) for index, spec in enumerate(chosen)],
        hash_block_size,
        draw(st.sampled_from([False, False, False, True])),
        None if interval is None else interval * scheduler_block_size,
    )


@st.composite
def mixes_with_hits_inside_blocks(draw: st.DrawFn) -> Mix:
    """States at chunk ends beside full attention, hashed finer than blocks (R6.1), now and then with a third group."""
    size = draw(st.sampled_from([4, 4, 8]))
    chosen: list[KVCacheSpec] = [FullAttentionSpec(draw(st.sampled_from([size, size, 4, 8]))), draw(specs("align", size))]
    if draw(st.sampled_from([False, False, True])):
        chosen.append(draw(specs(draw(st.sampled_from(["full", "mla", "rswa"])), 4)))
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(chosen)]
    return Mix(groups, draw(st.sampled_from([1, 2, 2])), draw(st.sampled_from([False, False, False, True])), draw(st.sampled_from([None, None, 0, 8])))
