# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernels of paged attention: a ragged batch of prefill chunks and decodes in one launch, online softmax over the block table.

The unit of work, a lane, is one KV head of one query block (up to BLOCK_Q consecutive queries of one request, with all query heads that share
the KV head as rows of one matrix). A GPU gets one lane per program, and the tiles have no axis for it: a matrix product with a leading axis of size 1
would be computed by every warp of the program over again. Interpreted, a program carries many lanes on the leading axis of its tiles, because every
operation costs about 0.05 ms and its data nearly nothing. So what belongs to a lane is a scalar or [LANES, 1], and axes are counted from the last one.
Addresses are sums of one term per lane and one per element.

Few requests with long contexts would leave most of a GPU idle: then the keys of a lane are split over several programs (SPLIT), each writes down what it has
so far (accumulator, maximum, total), and `reduce_splits_kernel` puts them together (Dao et al., Flash-Decoding).
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["block_table_stride", "partial_stride", "witness_stride", "progress_stride"])
def paged_attention_kernel(
    out_ptr,  # [num_tokens, num_q_heads, head_dim], the strides of query; not touched when the keys are split
    query_ptr,  # [num_tokens, num_q_heads, head_dim]
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache_ptr,
    block_table_ptr,  # int32 [num_reqs, width]
    query_block_request_ptr,  # int32 [>= lanes of the grid / NUM_KV_HEADS] request of the query block
    query_block_token_ptr,  # int64, same length: its first query, counted within the batch
    query_block_len_ptr,  # int32, same length: its number of queries, at most BLOCK_M // GROUP; a block of 0 does nothing
    query_block_position_ptr,  # int32, same length: position of its first query within the request; 0 where there are none
    scale_log2,  # softmax scale * log2(e), because exp2 is the hardware's exponential
    block_table_stride,
    query_stride_token,
    query_stride_head,
    cache_stride_block,
    cache_stride_slot,
    cache_stride_head,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,  # power of two >= HEAD_DIM
    SLIDING_WINDOW: tl.constexpr,  # 0: full attention
    UPCAST: tl.constexpr,  # take products in float32; a must interpreted, where a bfloat16 dot multiplies bit patterns
    SINGLE_QUERY: tl.constexpr,  # every query block has at most one query, so that all of its rows see the same keys
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows per lane, power of two >= GROUP
    TILE: tl.constexpr,  # keys per iteration
    ONE_TILE: tl.constexpr,  # interpreted only: no request has more than TILE tokens, so nothing is ever rescaled
    SPLIT: tl.constexpr,  # the grid's second axis shares the keys of a lane; needs LANES 1 and SINGLE_QUERY
    partial_ptr=None,  # float32 [splits, num_tokens * num_q_heads, head_dim]: the accumulator of each split
    partial_sums_ptr=None,  # float32 [splits, num_tokens * num_q_heads, 2]: maximum and total of each split
    partial_stride=None,  # num_tokens * num_q_heads
    witness_ptr=None,  # int64 [lanes of the grid, 3 + longest request]: first token, queries, KV head, then by position the slot read
    witness_stride=None,
    WITNESS: tl.constexpr = False,  # write down what each lane reads
    progress_ptr=None,  # float32 [lanes of the grid, tiles of the longest request, BLOCK_M, 2]: running maximum and total after each tile
    progress_stride=None,
    PROGRESS: tl.constexpr = False,  # write down how maximum and total grow
):
    lane = tl.program_id(0)
    if LANES > 1:
        lane = (lane * LANES + tl.arange(0, LANES))[:, None]
    query_block = lane // NUM_KV_HEADS
    kv_head = lane % NUM_KV_HEADS
    request = tl.load(query_block_request_ptr + query_block).to(tl.int64)
    first_token = tl.load(query_block_token_ptr + query_block)
    query_len = tl.load(query_block_len_ptr + query_block)
    first_position = tl.load(query_block_position_ptr + query_block)
    end_key = first_position + query_len  # keys that any row of the lane may see; none where there are no queries

    row = tl.arange(0, BLOCK_M)  # query row // GROUP of the block, head row % GROUP of the group
    dim = tl.arange(0, HEAD_PADDED)
    is_row = row < query_len * GROUP
    row_mask = tl.expand_dims(is_row, -1)
    if HEAD_DIM < HEAD_PADDED:
        row_mask = row_mask & (dim < HEAD_DIM)
    row_place = row * query_stride_head
    if not SINGLE_QUERY:
        row_place = (row // GROUP) * query_stride_token + (row % GROUP) * query_stride_head
    row_place = first_token * query_stride_token + kv_head * (query_stride_head * GROUP) + row_place
    place = tl.expand_dims(row_place, -1) + dim
    query = tl.load(query_ptr + place, mask=row_mask, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)

    account = lane.to(tl.int64)  # where the lane's own account of its work goes, if anybody asks for it
    if SPLIT:
        account = account * tl.num_programs(1) + tl.program_id(1)
    if WITNESS:
        witness_row = witness_ptr + account * witness_stride
        tl.store(witness_row, first_token)
        tl.store(witness_row + 1, query_len)
        tl.store(witness_row + 2, kv_head)

    first_tile = 0
    end_tile = 1
    if SLIDING_WINDOW > 0:
        first_key = tl.maximum(first_position - SLIDING_WINDOW + 1, 0)
    if not ONE_TILE:
        last_end = end_key
        if LANES > 1:
            last_end = tl.max(end_key)
        end_tile = (last_end + TILE - 1) // TILE
        if SLIDING_WINDOW > 0:
            oldest = first_key
            if LANES > 1:
                oldest = tl.min(tl.where(query_len > 0, first_key, 2147483647))
            first_tile = oldest // TILE
    if SPLIT:
        num_tiles = end_tile - first_tile
        end_tile = first_tile + num_tiles * (tl.program_id(1) + 1) // tl.num_programs(1)
        first_tile += num_tiles * tl.program_id(1) // tl.num_programs(1)

    # What a row must not see weighs exp2(-1e38 - maximum) = 0. Infinity would make NaN of a row that sees nothing in a tile; this way the row
    # averages what it does not see, and the first tile with a key that it does see scales that away to nothing.
    if not ONE_TILE:
        if LANES > 1:
            maximum = tl.full([LANES, BLOCK_M], -1.0e38, dtype=tl.float32)
            total = tl.full([LANES, BLOCK_M], 0.0, dtype=tl.float32)
            accumulator = tl.full([LANES, BLOCK_M, HEAD_PADDED], 0.0, dtype=tl.float32)
        else:
            maximum = tl.full([BLOCK_M], -1.0e38, dtype=tl.float32)
            total = tl.full([BLOCK_M], 0.0, dtype=tl.float32)
            accumulator = tl.full([BLOCK_M, HEAD_PADDED], 0.0, dtype=tl.float32)
    row_ptr = block_table_ptr + request * block_table_stride
    head_place = kv_head * cache_stride_head
    for tile in range(first_tile, end_tile):
        key_position = tl.arange(0, TILE)
        if not ONE_TILE:
            key_position += tile * TILE
        is_key = key_position < end_key  # [LANES, TILE], or [TILE] where there is one lane
        if SLIDING_WINDOW > 0:
            is_key = is_key & (key_position >= first_key)
        block = tl.load(row_ptr + key_position // BLOCK_SIZE, mask=is_key).to(tl.int64)
        slot_place = block * cache_stride_block + (key_position % BLOCK_SIZE * cache_stride_slot + head_place)
        cache_place = tl.expand_dims(slot_place, -1) + dim  # [(LANES,) TILE, HEAD_PADDED]
        if WITNESS:
            tl.store(witness_row + 3 + key_position, block * BLOCK_SIZE + key_position % BLOCK_SIZE, mask=is_key)
        key_mask = tl.expand_dims(is_key, -1)
        if HEAD_DIM < HEAD_PADDED:
            key_mask = key_mask & (dim < HEAD_DIM)
        # Unseen slots may hold anything: read zeros.
        key = tl.load(key_cache_ptr + cache_place, mask=key_mask, other=0.0)
        value = tl.load(value_cache_ptr + cache_place, mask=key_mask, other=0.0)
        if UPCAST:
            key = key.to(tl.float32)
            value = value.to(tl.float32)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2  # [(LANES,) BLOCK_M, TILE]
        if SINGLE_QUERY:
            visible = tl.expand_dims(is_key, -2)
        else:
            # For a row that is stored, causality and window imply is_key; the other rows only have to stay finite.
            distance = tl.expand_dims(first_position + row // GROUP, -1) - key_position
            visible = distance >= 0
            if SLIDING_WINDOW > 0:
                visible = visible & (distance < SLIDING_WINDOW)
        scores = tl.where(visible, scores, -1.0e38)
        if ONE_TILE:
            maximum = tl.max(scores, axis=-1)
            weights = tl.exp2(scores - tl.expand_dims(maximum, -1))
            total = tl.sum(weights, axis=-1)
            accumulator = tl.dot(weights, value, input_precision="ieee")
        else:
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=-1))
            weights = tl.exp2(scores - tl.expand_dims(new_maximum, -1))
            correction = tl.exp2(maximum - new_maximum)
            total = total * correction + tl.sum(weights, axis=-1)
            accumulator = accumulator * tl.expand_dims(correction, -1)
            accumulator += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            maximum = new_maximum
        if PROGRESS:
            # A lane may have to walk further than its own keys, where lanes share a program: then it has nothing to say.
            has_keys = (end_key > tile * TILE) & (query_len > 0)
            if SLIDING_WINDOW > 0:
                has_keys = has_keys & (first_key < (tile + 1) * TILE)
            progress_place = progress_ptr + account * progress_stride + (tile * BLOCK_M + row) * 2
            tl.store(progress_place, maximum, mask=is_row & has_keys)
            tl.store(progress_place + 1, total, mask=is_row & has_keys)

    if SPLIT:
        head = (first_token * NUM_KV_HEADS + kv_head) * GROUP + row  # token * num_q_heads + query head
        partial = tl.program_id(1) * partial_stride + head
        tl.store(partial_ptr + tl.expand_dims(partial, -1) * HEAD_DIM + dim, accumulator, mask=row_mask)
        tl.store(partial_sums_ptr + partial * 2, maximum, mask=is_row)
        tl.store(partial_sums_ptr + partial * 2 + 1, total, mask=is_row)
    else:
        result = accumulator / tl.expand_dims(total, -1)
        tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=row_mask)


@triton.jit(do_not_specialize=["num_splits", "partial_stride"])
def reduce_splits_kernel(
    out_ptr,  # [num_tokens, num_q_heads, head_dim]
    partial_ptr,  # float32 [splits, num_tokens * num_q_heads, head_dim]
    partial_sums_ptr,  # float32 [splits, num_tokens * num_q_heads, 2]: maximum and total
    query_block_token_ptr,  # int64 [query blocks]: the query
    query_block_len_ptr,  # int32 [query blocks]: 1, or 0 where there is none
    num_splits,
    partial_stride,  # num_tokens * num_q_heads
    out_stride_token,
    out_stride_head,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,  # power of two >= num_splits
):
    """One program per query and query head. A split without keys has the maximum -1e38 and so no weight."""
    token = tl.load(query_block_token_ptr + tl.program_id(0))
    is_query = tl.load(query_block_len_ptr + tl.program_id(0)) > 0
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, HEAD_PADDED)
    partial = split.to(tl.int64) * partial_stride + token * NUM_Q_HEADS + head
    is_split = (split < num_splits) & is_query
    maxima = tl.load(partial_sums_ptr + partial * 2, mask=is_split, other=-1.0e38)
    totals = tl.load(partial_sums_ptr + partial * 2 + 1, mask=is_split, other=0.0)
    is_element = is_split[:, None]
    is_dim = is_query
    if HEAD_DIM < HEAD_PADDED:
        is_element = is_element & (dim < HEAD_DIM)[None, :]
        is_dim = is_dim & (dim < HEAD_DIM)
    accumulators = tl.load(partial_ptr + partial[:, None] * HEAD_DIM + dim[None, :], mask=is_element, other=0.0)
    weights = tl.exp2(maxima - tl.max(maxima, axis=0))
    result = tl.sum(accumulators * weights[:, None], axis=0) / tl.sum(totals * weights, axis=0)
    out_place = token * out_stride_token + head * out_stride_head + dim
    tl.store(out_ptr + out_place, result.to(out_ptr.dtype.element_ty), mask=is_dim)
