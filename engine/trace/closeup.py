"""A close-up of the kernels of one step: plain data, made by `engine.worker.closeup` from a run that was repeated up to that step.

The trace of a run keeps no tensor. Who wants to see a kernel at work runs the session again up to the step in question (it is deterministic), keeps the inputs
of one layer, and launches the kernels once more on them, with the tiles of a GPU and with everything written down. Nothing here is taken from a table where
the kernel itself could tell it.
"""

from __future__ import annotations

import msgspec


class RowProgress(msgspec.Struct, frozen=True):
    """One row of a lane's matrix: the query of batch token `token` in query head `q_head`. `maxima`, `totals`: the running maximum of its scores (base-2
    logarithms) and the running sum of its weights after each tile, as the kernel had them in registers (online softmax)."""

    token: int
    q_head: int
    maxima: list[float]
    totals: list[float]


class TileStep(msgspec.Struct, frozen=True):
    """One iteration of a lane's loop: the keys at `positions` (first, end) of the request, in the columns `columns` (first, end) of its block-table row, which
    name `block_ids`; `slots`: the runs of slots that it read."""

    positions: tuple[int, int]
    columns: tuple[int, int]
    block_ids: list[int]
    slots: list[tuple[int, int]]


class LaneCloseup(msgspec.Struct, frozen=True):
    """What one lane of one program of the attention kernel did. `program`, `lane`: its place; `request_id`, `row`: whose queries, and its row of the block
    table; `tokens`: places of the queries in the batch; `first_position`: of the first query within the request; `kv_head`. `tiles` in order of the loop,
    `rows` as in `RowProgress`. A lane without queries has no tiles."""

    program: int
    lane: int
    request_id: str | None
    row: int | None
    tokens: list[int]
    first_position: int
    kv_head: int
    tiles: list[TileStep]
    rows: list[RowProgress]


class LaunchCloseup(msgspec.Struct, frozen=True):
    """One launch. `grid`: programs along each axis; `lanes`: per program; `constants`: the kernel's constexpr arguments by name; `lines`: of `KernelSource`,
    how often each line number ran in all programs together (0: a statement that never ran, such as a branch that this launch was compiled without; absent: no
    statement); a loop's header counts its iterations. `programs_of`: for `slot_mapping_kernel`, `reshape_and_cache_kernel` and `copy_pages_kernel` what each
    program worked for, one short text each; `attention`: the lanes of `paged_attention_kernel`. `num_warps`, `num_stages`: what a compiler is told besides
    (None: Triton's own choice)."""

    kernel: str
    grid: tuple[int, ...]
    lanes: int
    constants: dict[str, int | bool | None]
    lines: dict[int, int]
    programs_of: list[str] = []
    attention: list[LaneCloseup] = []
    num_warps: int | None = None
    num_stages: int | None = None


class KernelSource(msgspec.Struct, frozen=True):
    """The Triton source of a kernel: `first_line` is the line number of `lines[0]` in `file` (a path within the repository)."""

    kernel: str
    file: str
    first_line: int
    lines: list[str]


class Comparison(msgspec.Struct, frozen=True):
    """Reference against Triton for the attention of the layer, token by token of the batch and query head by query head: `difference[token][q_head]` is the
    largest absolute difference over the head's numbers, `largest` the largest of all. `reference` and `triton`: the first numbers of each output vector
    (`[token][q_head][k]`), to be shown side by side; `num_shown` of `head_dim` numbers."""

    reference: list[list[list[float]]]
    triton: list[list[list[float]]]
    num_shown: int
    head_dim: int
    difference: list[list[float]]
    largest: float


class CompiledKernel(msgspec.Struct, frozen=True):
    """What ahead-of-time compilation says of the kernel in this layer's shape. Bytes, but `registers` and `spilled_bytes` are those of one thread. `error`: one
    sentence instead, where it cannot be compiled."""

    kernel: str
    target: str
    assembly_bytes: int = 0
    binary_bytes: int = 0
    shared_bytes: int = 0
    registers: int = 0
    spilled_bytes: int = 0
    error: str | None = None


class TableRow(msgspec.Struct, frozen=True):
    """One request of the batch in the layer's group: its row of the block table as the kernels read it, the places of its tokens in the batch (first, end),
    the position of the first of them, and the slots that the slot-mapping kernel found for them."""

    request_id: str
    row: int
    block_ids: list[int]
    tokens: tuple[int, int]
    first_position: int
    slots: list[int]


class KernelCloseup(msgspec.Struct, frozen=True):
    """The kernels of engine step `step` in layer `layer` (of `num_layers`, of which `attention_layers` have keys and values), in KV-cache group `group_id`.

    `gpu`: the launches with the tiles that a GPU would get (one lane per program), run in the interpreter; `interpreted`: those of an interpreted layer of the
    run itself, with all lanes in few programs. Both in the order in which they ran. `comparison`: of the `gpu` launch. `left_out_tokens`: so many tokens of a
    large batch are not shown; their keys and values lie in the cache as if an earlier step had computed them, and the places of tokens count what is left."""

    step: int
    layer: int
    num_layers: int
    attention_layers: list[int]
    group_id: int
    block_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None
    scale: float
    table: list[TableRow]
    gpu: list[LaunchCloseup]
    interpreted: list[LaunchCloseup]
    sources: list[KernelSource]
    comparison: Comparison
    left_out_tokens: int = 0


class SlotArithmetic(msgspec.Struct, frozen=True):
    """Where the key and value of the token at `position` lie, step by step (R8.4).

    `virtual_block_size` = block_size · cp_world_size tokens; `virtual_block` and `offset`: position divided by it, quotient and remainder; `rank`: who keeps
    the token; `local_offset`: within the rank's part of the block; `column`: of the block-table row, which counts kernel blocks; `kernel_block_id`: what
    stands there;
    `kernel_offset`; `slot` = kernel_block_id · kernel_block_size + kernel_offset, or -1 when another rank than `cp_rank` keeps it or the row ends before.
    `block_id`: of the manager."""

    position: int
    block_size: int
    kernel_block_size: int
    cp_world_size: int
    cp_rank: int
    cp_interleave: int
    virtual_block_size: int
    virtual_block: int
    offset: int
    rank: int
    local_offset: int
    column: int
    block_id: int | None
    kernel_block_id: int | None
    kernel_offset: int
    slot: int
