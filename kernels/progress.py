"""How the softmax of paged attention grew, tile by tile, by the kernel's own account (`PROGRESS` in the kernel).

Online softmax: a lane walks the keys tile by tile and keeps for each row the largest score so far (`maximum`, in base-2 logarithms, because the kernel works
with exp2) and the sum of 2^(score - maximum) over the keys so far (`total`). A new maximum scales the old total by 2^(old maximum - new maximum).
"""

from __future__ import annotations

from dataclasses import dataclass, field

NOTHING_SEEN = -1.0e38
"""Maximum of a row that has seen none of its keys yet; its total then counts keys that it must not see, and the first one that it does see removes them."""


@dataclass(frozen=True)
class RowProgress:
    """One row of a lane: the query of batch token `token` in query head `q_head`. `maxima`, `totals`: after each of the lane's tiles."""

    token: int
    q_head: int
    maxima: tuple[float, ...]
    totals: tuple[float, ...]


@dataclass(frozen=True)
class LaneProgress:
    """One lane that had queries. `program`: its place in the grid (row after row, where the grid has two axes); `lane`: within the program; `request`: row of
    the block table; `tokens`: places of its queries in the batch; `first_position`: of the first of them within the request; `split`: which share of the keys
    was its own, 0 where they are not split; `tiles`: numbers of the tiles that it walked, where tile t holds the keys t * tile_size .. (t + 1) * tile_size - 1
    of the request, as far as it has them; every split begins afresh, and one without keys has no tiles."""

    program: int
    lane: int
    request: int
    kv_head: int
    tokens: tuple[int, ...]
    first_position: int
    split: int
    tiles: tuple[int, ...]
    rows: tuple[RowProgress, ...]


@dataclass(frozen=True)
class LaunchProgress:
    """One launch. `tile_size`: keys per iteration; `grid`: programs; `lanes_per_program`; `lanes`: those with queries, in order of the grid."""

    tile_size: int
    grid: int
    lanes_per_program: int
    lanes: tuple[LaneProgress, ...]


@dataclass
class Progress:
    """Give one to `paged_attention`, and it adds one launch to it; None where the torch reference ran, which has no tiles."""

    launches: list[LaunchProgress | None] = field(default_factory=list)
