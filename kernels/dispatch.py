"""The one dispatch point: four operations, checked here, executed by whichever backend the caller names."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kernels.backend import BACKENDS, Backend, GpuTiles, UnknownBackend
from kernels.metadata import AttentionMetadata, Derived, check_batch, check_slot_mapping, expect
from kernels.progress import Progress
from kernels.witness import KernelName, LaunchWitness, MappingWitness, Witness

if TYPE_CHECKING:  # torch and triton load when an operation first runs, so that `import kernels` stays instant
    from torch import Tensor

    from kernels.launch import Launcher

PAD_SLOT_ID = -1


def compute_slot_mapping(
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    *,
    block_size: int,
    kernel_block_size: int | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    witness: Witness | None = None,
    backend: Backend | str,
) -> None:
    """Fill `slot_mapping` with the physical slot of every scheduled token; only `slot_mapping` changes.

    query_start_loc: int32 [num_reqs + 1], the tokens of request r are query_start_loc[r] .. query_start_loc[r+1] - 1 of the batch;
    positions: int64 [>= num_tokens], position of each token within its request; block_table: int32 [>= num_reqs, width], physical blocks;
    slot_mapping: int64 [max_num_tokens], indexed by position in the batch; everything from num_tokens on becomes PAD_SLOT_ID (-1).
    `kernel_block_size` divides `block_size` when the kernels' blocks are smaller than the manager's. With context parallelism, tokens that
    belong to another rank than `cp_rank` get -1, and so does a position past the end of its row. `witness` is told what each program looked up and stored.
    Raises ValueError for shapes, dtypes or sizes that do not fit together. Source: R8.4, R8.5. vLLM: BlockTable.compute_slot_mapping; here: a function over
    tensors, the same arithmetic, and no look-up past the end of a row, which 0.27.0 does not prevent.
    """
    import torch

    if kernel_block_size is None:
        kernel_block_size = block_size
    if block_size < 1 or kernel_block_size < 1 or block_size % kernel_block_size:
        raise ValueError(f"block_size {block_size} is not a positive multiple of kernel_block_size {kernel_block_size}.")
    if cp_world_size < 1 or cp_interleave < 1 or block_size % cp_interleave or not 0 <= cp_rank < cp_world_size:
        raise ValueError(
            f"Context parallel rank {cp_rank} of {cp_world_size} with interleave {cp_interleave} does not fit block_size {block_size}:"
            " the rank must be below the world size and the interleave must divide the block size."
        )
    expect("query_start_loc", query_start_loc, torch.int32, 1)
    expect("positions", positions, torch.int64, 1)
    expect("block_table", block_table, torch.int32, 2)
    expect("slot_mapping", slot_mapping, torch.int64, 1)
    if query_start_loc.shape[0] - 1 > block_table.shape[0]:
        raise ValueError(f"query_start_loc names {query_start_loc.shape[0] - 1} requests, but block_table has only {block_table.shape[0]} rows.")
    told = {"witness": witness} if witness is not None and not _is_reference(backend) else {}
    if witness is not None and not told:
        witness.mappings.append(MappingWitness(kernel_block_size, slot_mapping.shape[0], None))
    _implementation(backend).compute_slot_mapping(
        query_start_loc,
        positions,
        block_table,
        slot_mapping,
        block_size=block_size,
        kernel_block_size=kernel_block_size,
        cp_world_size=cp_world_size,
        cp_rank=cp_rank,
        cp_interleave=cp_interleave,
        **told,
    )


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    metadata: AttentionMetadata | None = None,
    witness: Witness | None = None,
    backend: Backend | str,
) -> None:
    """Write each token's key and value into its slot; only the caches change.

    key, value: [>= num_slots, num_kv_heads, head_dim]; caches: [num_blocks, block_size, num_kv_heads, head_dim], slot s is row s % block_size
    of block s // block_size; slot_mapping: int64 [num_slots], negative slots are skipped. No slot may appear twice. `metadata`, made from the
    same slot_mapping, saves the layers of a step repeating the same work. `witness` is told what each program wrote.
    Raises ValueError for shapes or dtypes that do not fit. Source: R8.6; vLLM: reshape_and_cache_flash; here: no quantised caches.
    """
    if metadata is None:
        check_slot_mapping(slot_mapping)
    else:
        metadata.expect(slot_mapping=slot_mapping)
    _expect_caches(key_cache, value_cache, metadata)
    num_slots, token_shape, dtype = slot_mapping.shape[0], key_cache.shape[2:], key_cache.dtype
    key_shape, value_shape = key.shape, value.shape
    if (
        key_shape[1:] != token_shape
        or key_shape[0] < num_slots
        or (value_shape != key_shape and (value_shape[1:] != token_shape or value_shape[0] < num_slots))
    ):
        raise ValueError(f"key has shape {tuple(key_shape)} and value {tuple(value_shape)}, but {num_slots} tokens of {tuple(token_shape)} are to be written.")
    if key.dtype != dtype or value.dtype != dtype:
        raise ValueError(f"key is {key.dtype} and value {value.dtype}, but the caches hold {dtype}; convert one of them.")
    if num_slots == 0:
        return
    told = _tell("reshape_and_cache", key_cache, witness, backend)
    _implementation(backend).reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, metadata or Derived(), **told)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    out: Tensor | None = None,
    metadata: AttentionMetadata | None = None,
    witness: Witness | None = None,
    progress: Progress | None = None,
    backend: Backend | str,
) -> Tensor:
    """Causal attention of a ragged batch (prefill chunks and decodes together) over the paged cache, in one launch. Returns `out`.

    query: [num_tokens, num_q_heads, head_dim], float32, float16 or bfloat16; caches: [num_blocks, block_size, num_kv_heads, head_dim];
    block_table: int32 [>= num_reqs, width]; query_start_loc: int32 [num_reqs + 1]; seq_lens: int32 [num_reqs], tokens in the cache
    including this step's. The queries of request r are the LAST query_len positions of its seq_lens[r] tokens. Query head h reads KV head
    h // (num_q_heads // num_kv_heads). With `sliding_window` W the query at position p sees keys p-W+1 .. p. Products and sums are taken in
    float32. Rows of `out` past the last query are left as they were (zeros when `out` is not given); only `out` changes.
    `metadata`, made from the same block_table, query_start_loc and seq_lens, saves the layers of a step repeating the same work. `witness` is told what
    each program read, `progress` how each lane's softmax grew tile by tile.
    Raises ValueError for shapes or dtypes that do not fit. Source: the PagedAttention paper, section 4.1, and online softmax;
    vLLM: unified_attention; here: no ALiBi, soft cap, sinks, cascade or quantised caches.
    """
    import torch

    if metadata is None:
        check_batch(block_table, query_start_loc, seq_lens)
    else:
        metadata.expect(block_table=block_table, query_start_loc=query_start_loc, seq_lens=seq_lens)
    _expect_caches(key_cache, value_cache, metadata)
    query_shape, dtype = query.shape, query.dtype
    num_kv_heads, head_dim = key_cache.shape[2:]
    if len(query_shape) != 3 or query_shape[2] != head_dim or query_shape[1] % num_kv_heads:
        raise ValueError(f"query has shape {tuple(query_shape)}; it must be [num_tokens, a multiple of {num_kv_heads} heads, {head_dim}] to fit the cache.")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}; it must be at least 1, or None for full attention.")
    if out is None:
        out = torch.zeros(query_shape, dtype=dtype, device=query.device)
    elif out.shape != query_shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, but query has {tuple(query_shape)}.")
    if key_cache.dtype != dtype or out.dtype != dtype:
        raise ValueError(f"query is {dtype}, the caches hold {key_cache.dtype} and out is {out.dtype}; all three must be the same.")
    if seq_lens.shape[0] == 0 or query_shape[0] == 0:
        return out
    told: dict[str, Any] = _tell("paged_attention", key_cache, witness, backend)
    if progress is not None:
        if _is_reference(backend):
            progress.launches.append(None)
        else:
            told["progress"] = progress
    _implementation(backend).paged_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        seq_lens,
        scale=scale,
        sliding_window=sliding_window,
        out=out,
        derived=metadata or Derived(),
        **told,
    )
    return out


def copy_blocks(key_caches: list[Tensor], value_caches: list[Tensor], block_pairs: Tensor, *, witness: Witness | None = None, backend: Backend | str) -> None:
    """Copy physical blocks within every layer's caches; only the destinations change.

    Caches: one [num_blocks, ...] tensor per layer; block_pairs: int64 [n, 2], rows (source, destination), on the caches' device or on the CPU, where a GPU's
    host can see that no page is both read and written, which saves the way through a buffer. All sources are read before any
    destination is written, so chains (1 -> 2, 2 -> 3) and swaps copy the old contents. No destination may appear twice. `witness` is told of one launch per
    layer.
    Raises ValueError for a wrong shape or dtype. Source: R6.7; vLLM: copy_blocks; here: hazards between pairs are allowed, as in V1's worker.
    """
    import torch

    expect("block_pairs", block_pairs, torch.int64, 2)
    if block_pairs.shape[1] != 2 or len(key_caches) != len(value_caches):
        raise ValueError(
            f"block_pairs has shape {tuple(block_pairs.shape)} and there are {len(key_caches)} key and {len(value_caches)} value caches;"
            " [n, 2] and equally many are needed."
        )
    if block_pairs.shape[0] == 0 or not key_caches:
        return
    if not all(cache[0].is_contiguous() for cache in (*key_caches, *value_caches)):
        raise ValueError("A block of the caches is not contiguous in memory; blocks are copied as whole pages.")
    told: dict[str, Witness] = {}
    for key_cache in key_caches if _is_reference(backend) else key_caches[:1]:
        told = _tell("copy_blocks", key_cache, witness, backend)
    _implementation(backend).copy_blocks(key_caches, value_caches, block_pairs, **told)


def _tell(kernel: KernelName, key_cache: Tensor, witness: Witness | None, backend: Backend | str) -> dict[str, Witness]:
    """What an implementation is given besides its arguments. The torch reference has no programs, so what is to be said of it is said here."""
    if witness is None:
        return {}
    if not _is_reference(backend):
        return {"witness": witness}
    witness.launches.append(LaunchWitness(kernel, key_cache.shape[1], None))
    return {}


def _is_reference(backend: Backend | str) -> bool:
    return (backend.name if isinstance(backend, Backend) else backend) == "torch"


def _implementation(backend: Backend | str) -> Any:
    """The four operations: a module, or a launcher with tiles of its own."""
    if not isinstance(backend, Backend):
        return _module(backend)
    return _module(backend.name) if backend.gpu_tiles is None else _like_gpu(backend.gpu_tiles)


@functools.cache
def _like_gpu(tiles: GpuTiles) -> Launcher:
    from kernels.interpreter import launch
    from kernels.launch import Launcher

    return Launcher(run=launch, interpreted=True, own_account=False, gpu_tiles=tiles)


@functools.cache
def _module(name: str) -> ModuleType:
    if name == "torch":
        return importlib.import_module("kernels.reference")
    if name == "triton":
        return importlib.import_module("kernels.compiled")
    if name == "interpret":
        return importlib.import_module("kernels.interpreted")
    raise UnknownBackend(f"There is no backend {name!r}; choose one of {', '.join(BACKENDS)}.")


def _expect_caches(key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata | None) -> None:
    """A layer's caches are checked once per step: at the write, not again at the attention that follows."""
    if metadata is not None and metadata.checked_caches is not None:
        checked_key_cache, checked_value_cache = metadata.checked_caches
        if checked_key_cache is key_cache and checked_value_cache is value_cache:
            return
    if key_cache.dim() != 4 or key_cache.shape != value_cache.shape or key_cache.dtype != value_cache.dtype:
        raise ValueError(
            f"The caches have shapes {tuple(key_cache.shape)} and {tuple(value_cache.shape)} and dtypes {key_cache.dtype} and"
            f" {value_cache.dtype}; both must be the same [num_blocks, block_size, num_kv_heads, head_dim]."
        )
    if key_cache.stride(-1) != 1 or key_cache.stride() != value_cache.stride():
        raise ValueError(f"The caches have strides {key_cache.stride()} and {value_cache.stride()}; both must be the same, and stride 1 in head_dim.")
    if metadata is not None:
        metadata.checked_caches = key_cache, value_cache
