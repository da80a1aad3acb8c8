# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernel of paged attention: a ragged batch of prefill chunks and decodes in one launch, online softmax over the block table.

The unit of work, a lane, is one KV head of one query block (up to BLOCK_Q consecutive queries of one request, with all query heads that share
the KV head as rows of one matrix). A program carries LANES lanes on the leading axis of its tiles: one on a GPU, all of them interpreted, where
a program's iteration costs about 5 ms and its data nearly nothing.
"""

import triton
import triton.language as tl


@triton.jit
def paged_attention_kernel(
    out_ptr,  # [num_tokens, num_q_heads, head_dim]
    query_ptr,  # [num_tokens, num_q_heads, head_dim]
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache_ptr,
    block_table_ptr,  # int32 [num_reqs, width]
    query_start_loc_ptr,  # int32 [num_reqs + 1]
    seq_lens_ptr,  # int32 [num_reqs]
    query_block_request_ptr,  # int32 [>= lanes of the grid / NUM_KV_HEADS] request of the query block
    query_block_start_ptr,  # int32, same length: its first query, counted within the request; past the request's end it does nothing
    scale_log2,  # softmax scale * log2(e), because exp2 is the hardware's exponential
    block_table_stride,
    out_stride_token,
    out_stride_head,
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
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows per lane, power of two >= GROUP
    TILE: tl.constexpr,  # keys per iteration
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    query_block = lane // NUM_KV_HEADS
    kv_head = lane % NUM_KV_HEADS
    request = tl.load(query_block_request_ptr + query_block)
    block_start = tl.load(query_block_start_ptr + query_block)
    first_token = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - first_token
    context_len = tl.load(seq_lens_ptr + request) - query_len

    row = tl.arange(0, BLOCK_M)
    query_index = block_start[:, None] + (row // GROUP)[None, :]  # [LANES, BLOCK_M], counted within the request
    is_row = query_index < query_len[:, None]
    if BLOCK_Q * GROUP < BLOCK_M:
        is_row = is_row & (row < BLOCK_Q * GROUP)[None, :]
    query_position = context_len[:, None] + query_index
    token = (first_token[:, None] + query_index).to(tl.int64)
    q_head = kv_head[:, None] * GROUP + (row % GROUP)[None, :]
    dim = tl.arange(0, HEAD_PADDED)
    row_mask = is_row[:, :, None]
    if HEAD_DIM < HEAD_PADDED:
        row_mask = row_mask & (dim < HEAD_DIM)[None, None, :]
    query_place = (token * query_stride_token + q_head * query_stride_head)[:, :, None] + dim[None, None, :]
    query = tl.load(query_ptr + query_place, mask=row_mask, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)

    # Keys that any row of the lane may see; a query block past the end of its request sees none.
    end_key = context_len + tl.minimum(block_start + BLOCK_Q, query_len)
    end_key = tl.where(block_start < query_len, end_key, 0)
    end_tile = (tl.max(end_key, axis=0) + TILE - 1) // TILE
    first_tile = 0
    if SLIDING_WINDOW > 0:
        first_key = tl.maximum(context_len + block_start - SLIDING_WINDOW + 1, 0)
        first_tile = tl.min(tl.where(end_key > 0, first_key, 2147483647), axis=0) // TILE

    maximum = tl.full([LANES, BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.full([LANES, BLOCK_M], 0.0, dtype=tl.float32)
    accumulator = tl.full([LANES, BLOCK_M, HEAD_PADDED], 0.0, dtype=tl.float32)
    row_ptr = block_table_ptr + request.to(tl.int64) * block_table_stride
    for tile in range(first_tile, end_tile):
        key_position = tile * TILE + tl.arange(0, TILE)
        is_key = key_position[None, :] < end_key[:, None]  # [LANES, TILE]
        if SLIDING_WINDOW > 0:
            is_key = is_key & (key_position[None, :] >= first_key[:, None])
        block = tl.load(row_ptr[:, None] + (key_position // BLOCK_SIZE)[None, :], mask=is_key, other=0).to(tl.int64)
        offset = (key_position % BLOCK_SIZE)[None, :]
        slot = block * cache_stride_block + offset * cache_stride_slot + kv_head[:, None] * cache_stride_head
        key_mask = is_key[:, None, :]
        value_mask = is_key[:, :, None]
        if HEAD_DIM < HEAD_PADDED:
            key_mask = key_mask & (dim < HEAD_DIM)[None, :, None]
            value_mask = value_mask & (dim < HEAD_DIM)[None, None, :]
        # [LANES, HEAD_PADDED, TILE], transposed as it is read, and [LANES, TILE, HEAD_PADDED]; unseen slots may hold anything: read zeros.
        key = tl.load(key_cache_ptr + (slot[:, None, :] + dim[None, :, None]), mask=key_mask, other=0.0)
        value = tl.load(value_cache_ptr + (slot[:, :, None] + dim[None, None, :]), mask=value_mask, other=0.0)
        if UPCAST:
            key = key.to(tl.float32)
            value = value.to(tl.float32)
        scores = tl.dot(query, key, input_precision="ieee") * scale_log2
        # For a row that is stored, causality and window imply is_key; the other rows only have to stay finite.
        distance = query_position[:, :, None] - key_position[None, None, :]
        visible = distance >= 0
        if SLIDING_WINDOW > 0:
            visible = visible & (distance < SLIDING_WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=2))
        reference = new_maximum
        if SLIDING_WINDOW > 0:
            # A row whose window starts in a later tile keeps -inf; subtracting 0 keeps exp2(-inf - -inf) from becoming NaN.
            reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - reference[:, :, None])
        correction = tl.exp2(maximum - reference)
        total = total * correction + tl.sum(weights, axis=2)
        accumulator = accumulator * correction[:, :, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        maximum = new_maximum

    if SLIDING_WINDOW > 0:
        total = tl.where(total == 0.0, 1.0, total)
    result = accumulator / total[:, :, None]
    out_place = (token * out_stride_token + q_head * out_stride_head)[:, :, None] + dim[None, None, :]
    tl.store(out_ptr + out_place, result.to(out_ptr.dtype.element_ty), mask=row_mask)
