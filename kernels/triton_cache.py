# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernels that move keys and values: slot mapping, KV write, page copy.

One source for the GPU and for the interpreter. Interpreted, a program costs about 5 ms and its data nearly nothing, so the leading axis of
every tile is as wide as the whole batch there and one or a few items wide on a GPU.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_reqs", "max_num_tokens", "block_table_stride", "width"])
def slot_mapping_kernel(
    query_start_loc_ptr,  # int32 [num_reqs + 1]
    positions_ptr,  # int64 [num_tokens]
    block_table_ptr,  # int32 [num_reqs, width]
    slot_mapping_ptr,  # int64 [max_num_tokens]
    num_reqs,
    max_num_tokens,
    block_table_stride,
    width,  # columns of a row
    BLOCK_SIZE: tl.constexpr,
    KERNEL_BLOCK_SIZE: tl.constexpr,
    CP_WORLD_SIZE: tl.constexpr,
    CP_RANK: tl.constexpr,
    CP_INTERLEAVE: tl.constexpr,
    PAD_SLOT_ID: tl.constexpr,
    LANES: tl.constexpr,  # requests per program
    TILE: tl.constexpr,  # tokens per iteration
    witness_ptr=None,  # int64 [max_num_tokens, 3]: row and column of the block table that were looked up (-1: none), the slot that was stored
    WITNESS: tl.constexpr = False,  # write them down
):
    """Programs 0 .. n-2 map the tokens of LANES requests each; the last program pads the tail (R8.5)."""
    program = tl.program_id(0)
    tile_offsets = tl.arange(0, TILE)
    if program == tl.num_programs(0) - 1:
        num_tokens = tl.load(query_start_loc_ptr + num_reqs)
        for start in range(num_tokens, max_num_tokens, TILE):
            index = start + tile_offsets
            padding = tl.full([TILE], PAD_SLOT_ID, tl.int64)
            tl.store(slot_mapping_ptr + index, padding, mask=index < max_num_tokens)
            if WITNESS:
                account = witness_ptr + index.to(tl.int64) * 3
                tl.store(account, tl.full([TILE], -1, tl.int64), mask=index < max_num_tokens)
                tl.store(account + 2, padding, mask=index < max_num_tokens)
    else:
        request = program * LANES + tl.arange(0, LANES)
        is_request = request < num_reqs
        first_token = tl.load(query_start_loc_ptr + request, mask=is_request, other=0)
        end_token = tl.load(query_start_loc_ptr + request + 1, mask=is_request, other=0)
        row_ptr = block_table_ptr + request.to(tl.int64) * block_table_stride
        longest = tl.max(end_token - first_token, axis=0)
        for start in range(0, longest, TILE):
            token = first_token[:, None] + start + tile_offsets[None, :]
            is_token = token < end_token[:, None]
            position = tl.load(positions_ptr + token, mask=is_token, other=0)
            virtual_block_size = BLOCK_SIZE * CP_WORLD_SIZE
            local_offset = position % virtual_block_size
            column = position // virtual_block_size
            has_slot = is_token
            if CP_WORLD_SIZE > 1:  # what would change nothing is left out: the interpreter takes as long for it
                has_slot = has_slot & ((local_offset // CP_INTERLEAVE) % CP_WORLD_SIZE == CP_RANK)
                local_offset = local_offset // (CP_INTERLEAVE * CP_WORLD_SIZE) * CP_INTERLEAVE + local_offset % CP_INTERLEAVE
            if KERNEL_BLOCK_SIZE < BLOCK_SIZE:
                column = column * (BLOCK_SIZE // KERNEL_BLOCK_SIZE) + local_offset // KERNEL_BLOCK_SIZE
                local_offset = local_offset % KERNEL_BLOCK_SIZE
            has_slot = has_slot & (column < width)  # past the row's end lies another request's row
            block = tl.load(row_ptr[:, None] + column, mask=has_slot, other=0).to(tl.int64)
            slot = tl.where(has_slot, block * KERNEL_BLOCK_SIZE + local_offset, PAD_SLOT_ID)
            tl.store(slot_mapping_ptr + token, slot, mask=is_token)
            if WITNESS:
                account = witness_ptr + token.to(tl.int64) * 3
                tl.store(account, tl.zeros([LANES, TILE], tl.int64) + request.to(tl.int64)[:, None], mask=is_token)
                tl.store(account + 1, tl.where(has_slot, column, -1), mask=is_token)
                tl.store(account + 2, slot, mask=is_token)


@triton.jit(do_not_specialize=["num_tokens"])
def reshape_and_cache_kernel(
    key_ptr,  # [num_tokens, num_kv_heads, head_dim]
    value_ptr,  # the strides of key
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache_ptr,
    slot_mapping_ptr,  # int64 [num_tokens]
    num_tokens,
    key_stride_token,
    key_stride_head,
    cache_stride_block,
    cache_stride_slot,
    cache_stride_head,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,  # power of two >= NUM_KV_HEADS * HEAD_DIM
    DENSE_SLOTS: tl.constexpr,  # a block's last slot is followed by the next block's first
    DENSE_HEADS: tl.constexpr,  # a token's heads lie one behind the other, in key and cache
    TOKENS: tl.constexpr,  # tokens per program
    EVEN: tl.constexpr,  # num_tokens is a multiple of TOKENS
    witness_ptr=None,  # int64 [num_tokens]: the slot that was written
    WITNESS: tl.constexpr = False,  # write it down
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slot_mapping_ptr + token, mask=None if EVEN else token < num_tokens, other=None if EVEN else -1)
    element = tl.arange(0, ROW)
    mask = (slot >= 0)[:, None]
    if NUM_KV_HEADS * HEAD_DIM < ROW:
        mask = mask & (element < NUM_KV_HEADS * HEAD_DIM)[None, :]
    if DENSE_HEADS:
        source_element = element[None, :]
        place_element = source_element
    else:
        head = element // HEAD_DIM
        dim = element % HEAD_DIM
        source_element = (head * key_stride_head + dim)[None, :]
        place_element = (head * cache_stride_head + dim)[None, :]
    slot_place = slot * cache_stride_slot
    if not DENSE_SLOTS:
        slot_place = slot // BLOCK_SIZE * cache_stride_block + slot % BLOCK_SIZE * cache_stride_slot
    source = (token.to(tl.int64) * key_stride_token)[:, None] + source_element
    place = slot_place[:, None] + place_element
    key = tl.load(key_ptr + source, mask=mask)
    value = tl.load(value_ptr + source, mask=mask)
    tl.store(key_cache_ptr + place, key, mask=mask)
    tl.store(value_cache_ptr + place, value, mask=mask)
    if WITNESS:
        tl.store(witness_ptr + token, slot, mask=slot >= 0)


@triton.jit(do_not_specialize=["num_pages", "index_stride"])
def copy_pages_kernel(
    source_ptr,  # [num_source_pages, page_size]
    destination_ptr,  # [num_destination_pages, page_size]
    source_index_ptr,  # int64 [num_pages] page read, at a stride (a column of the pairs); unused when gathering is off
    destination_index_ptr,
    num_pages,
    index_stride,
    page_size,
    source_stride,
    destination_stride,
    GATHER: tl.constexpr,  # read page source_index[i]; otherwise page i
    SCATTER: tl.constexpr,  # write page destination_index[i]; otherwise page i
    PAGES: tl.constexpr,  # pages per program
    TILE: tl.constexpr,  # elements of a page per program
    value_source_ptr=None,  # a second pair of tensors with the same shapes and strides: the first two hold keys, these values
    value_destination_ptr=None,
    VALUES: tl.constexpr = False,  # copy the second pair too
    witness_ptr=None,  # int64 [num_pages, 2]: the page read when gathering, the page written when scattering
    WITNESS: tl.constexpr = False,  # write them down
):
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    is_page = page < num_pages
    source = page.to(tl.int64)
    destination = page.to(tl.int64)
    if GATHER:
        source = tl.load(source_index_ptr + page * index_stride, mask=is_page, other=0)
    if SCATTER:
        destination = tl.load(destination_index_ptr + page * index_stride, mask=is_page, other=0)
    element = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = is_page[:, None] & (element < page_size)[None, :]
    source_place = source[:, None] * source_stride + element[None, :]
    destination_place = destination[:, None] * destination_stride + element[None, :]
    content = tl.load(source_ptr + source_place, mask=mask)
    if VALUES:
        value_content = tl.load(value_source_ptr + source_place, mask=mask)
        tl.store(value_destination_ptr + destination_place, value_content, mask=mask)
    tl.store(destination_ptr + destination_place, content, mask=mask)
    if WITNESS:
        if GATHER:
            tl.store(witness_ptr + page * 2, source, mask=is_page)
        if SCATTER:
            tl.store(witness_ptr + page * 2 + 1, destination, mask=is_page)
