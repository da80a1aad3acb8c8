# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernel of paged attention: a ragged batch of prefill chunks and decodes in one launch, online softmax over the block table.

The unit of work, a lane, is one KV head of one query block (up to BLOCK_Q consecutive queries of one request, with all query heads that share
the KV head as rows of one matrix). A program carries LANES lanes on the leading axis of its tiles: one on a GPU, all of them interpreted, where
every operation costs about 0.05 ms and its data nearly nothing. Hence also that addresses are sums of one term per lane and one per element.
"""

import triton
import triton.language as tl


@triton.jit
def paged_attention_kernel(
    out_ptr,  # [num_tokens, num_q_heads, head_dim], the strides of query
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
    witness_ptr=None,  # int64 [lanes of the grid, 3 + longest request]: first token, queries, KV head, then by position the slot read
    witness_stride=None,
    WITNESS: tl.constexpr = False,  # write down what each lane reads
    progress_ptr=None,  # float32 [lanes of the grid, tiles of the longest request, BLOCK_M, 2]: running maximum and total after each tile
    progress_stride=None,
    PROGRESS: tl.constexpr = False,  # write down how maximum and total grow
):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    query_block = lane // NUM_KV_HEADS
    kv_head = lane % NUM_KV_HEADS
    request = tl.load(query_block_request_ptr + query_block)
    first_token = tl.load(query_block_token_ptr + query_block)
    query_len = tl.load(query_block_len_ptr + query_block)
    first_position = tl.load(query_block_position_ptr + query_block)
    end_key = first_position + query_len  # keys that any row of the lane may see; none where there are no queries

    row = tl.arange(0, BLOCK_M)  # query row // GROUP of the block, head row % GROUP of the group
    dim = tl.arange(0, HEAD_PADDED)
    row_mask = (row[None, :] < (query_len * GROUP)[:, None])[:, :, None]
    if HEAD_DIM < HEAD_PADDED:
        row_mask = row_mask & (dim < HEAD_DIM)[None, None, :]
    row_place = row * query_stride_head
    if not SINGLE_QUERY:
        row_place = (row // GROUP) * query_stride_token + (row % GROUP) * query_stride_head
    lane_place = first_token * query_stride_token + kv_head * (query_stride_head * GROUP)
    place = lane_place[:, None, None] + (row_place[:, None] + dim[None, :])[None, :, :]
    query = tl.load(query_ptr + place, mask=row_mask, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)

    if WITNESS:
        witness_row = witness_ptr + lane.to(tl.int64) * witness_stride
        tl.store(witness_row, first_token)
        tl.store(witness_row + 1, query_len)
        tl.store(witness_row + 2, kv_head)

    first_tile = 0
    end_tile = 1
    if not ONE_TILE:
        end_tile = (tl.max(end_key, axis=0) + TILE - 1) // TILE
    if SLIDING_WINDOW > 0:
        first_key = tl.maximum(first_position - SLIDING_WINDOW + 1, 0)
        if not ONE_TILE:
            first_tile = tl.min(tl.where(query_len > 0, first_key, 2147483647), axis=0) // TILE

    # What a row must not see weighs exp2(-1e38 - maximum) = 0. Infinity would make NaN of a row that sees nothing in a tile; this way the row
    # averages what it does not see, and the first tile with a key that it does see scales that away to nothing.
    if not ONE_TILE:
        maximum = tl.full([LANES, BLOCK_M], -1.0e38, dtype=tl.float32)
        total = tl.full([LANES, BLOCK_M], 0.0, dtype=tl.float32)
        accumulator = tl.full([LANES, BLOCK_M, HEAD_PADDED], 0.0, dtype=tl.float32)
    row_ptr = block_table_ptr + request * block_table_stride
    head_place = kv_head * cache_stride_head
    for tile in range(first_tile, end_tile):
        key_position = tl.arange(0, TILE)
        if not ONE_TILE:
            key_position += tile * TILE
        is_key = key_position[None, :] < end_key[:, None]  # [LANES, TILE]
        if SLIDING_WINDOW > 0:
            is_key = is_key & (key_position[None, :] >= first_key[:, None])
        block = tl.load(row_ptr[:, None] + (key_position // BLOCK_SIZE)[None, :], mask=is_key).to(tl.int64)
        inner_place = (key_position % BLOCK_SIZE * cache_stride_slot)[None, :] + head_place[:, None]
        cache_place = (block * cache_stride_block + inner_place)[:, :, None] + dim[None, None, :]  # [LANES, TILE, HEAD_PADDED]
        if WITNESS:
            slot = block * BLOCK_SIZE + (key_position % BLOCK_SIZE)[None, :]
            tl.store(witness_row[:, None] + 3 + key_position[None, :], slot, mask=is_key)
        key_mask = is_key[:, :, None]
        if HEAD_DIM < HEAD_PADDED:
            key_mask = key_mask & (dim < HEAD_DIM)[None, None, :]
        # Unseen slots may hold anything: read zeros.
        key = tl.load(key_cache_ptr + cache_place, mask=key_mask, other=0.0)
        value = tl.load(value_cache_ptr + cache_place, mask=key_mask, other=0.0)
        if UPCAST:
            key = key.to(tl.float32)
            value = value.to(tl.float32)
        scores = tl.dot(query, tl.permute(key, (0, 2, 1)), input_precision="ieee") * scale_log2
        if SINGLE_QUERY:
            visible = is_key[:, None, :]
        else:
            # For a row that is stored, causality and window imply is_key; the other rows only have to stay finite.
            query_position = first_position[:, None] + (row // GROUP)[None, :]
            distance = query_position[:, :, None] - key_position[None, None, :]
            visible = distance >= 0
            if SLIDING_WINDOW > 0:
                visible = visible & (distance < SLIDING_WINDOW)
        scores = tl.where(visible, scores, -1.0e38)
        if ONE_TILE:
            maximum = tl.max(scores, axis=2)
            weights = tl.exp2(scores - maximum[:, :, None])
            total = tl.sum(weights, axis=2)
            accumulator = tl.dot(weights, value, input_precision="ieee")
        else:
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=2))
            weights = tl.exp2(scores - new_maximum[:, :, None])
            correction = tl.exp2(maximum - new_maximum)
            total = total * correction + tl.sum(weights, axis=2)
            accumulator = accumulator * correction[:, :, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            maximum = new_maximum
        if PROGRESS:
            # A lane may have to walk further than its own keys, where lanes share a program: then it has nothing to say.
            walks = (tl.sum(is_key.to(tl.int32), axis=1) > 0)[:, None] & (row[None, :] < (query_len * GROUP)[:, None])
            progress_place = (lane.to(tl.int64) * progress_stride)[:, None] + ((tile * BLOCK_M + row) * 2)[None, :]
            tl.store(progress_ptr + progress_place, maximum, mask=walks)
            tl.store(progress_ptr + progress_place + 1, total, mask=walks)

    result = accumulator / total[:, :, None]
    tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=row_mask)
