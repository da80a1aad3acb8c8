// The frames that the stage holds. They arrive in portions; stepping among them never asks the server.
const FRAMES_PER_CACHE = 40; // between two frames that hold the whole prefix cache

const STANDING = ["requests", "rows", "running", "waiting", "swapped", "copies", "agreed", "counters", "row_notes", "row_reads"]; // not sent where they are as in the frame before

class Recording {
  constructor() {
    this.clear(null);
  }

  clear(traceId) {
    this.traceId = traceId;
    this.frames = [];
    this.complete = false;
    this.header = null;
    this.vocabulary = {};
    this.notes = {};
    this.unconfirmed = [];
    this.corrections = {};
    this.requestOrder = [];
    this.choices = []; // frames in which beams were chosen
    this.endedAt = new Map(); // sequence -> index of the frame in which it was finished or dropped
  }

  // Take over a portion; frames that are held already are left alone. Returns whether anything is new.
  append(data) {
    const fresh = data.trace_id !== this.traceId;
    if (fresh) this.clear(data.trace_id);
    const before = this.frames.length;
    this.header = data.header;
    this.notes = data.notes || {};
    this.unconfirmed = data.unconfirmed || [];
    this.corrections = data.corrections || {};
    Object.assign(this.vocabulary, data.vocabulary);
    if (data.start <= before) {
      const requests = wholeRows(data.requests);
      for (const sent of data.frames.slice(before - data.start)) this.frames.push(this.resolve(sent, data, requests, this.frames[this.last]));
    }
    const grew = this.frames.length !== before || fresh || this.complete !== data.complete;
    this.complete = data.complete;
    this.missing = data.start > before;
    return grew;
  }

  // A frame as it was sent, with states instead of indices. What is not sent is as in the frame before; frames share it, nothing changes it.
  resolve(sent, data, requests, before) {
    const frame = Object.assign({}, sent);
    for (const name of STANDING) if (!(name in sent)) frame[name] = before[name];
    if (sent.blocks) frame.blocks = sent.blocks.map((i) => data.blocks[i]);
    else frame.blocks = sent.changed ? before.blocks.slice() : before.blocks;
    for (const [id, index] of sent.changed || []) frame.blocks[id] = data.blocks[index];
    const moved = sent.queue_change;
    if (moved) frame.queue = [...moved.head, ...(moved.out.length ? before.queue.filter((id) => !moved.out.includes(id)) : before.queue), ...moved.tail];
    else if (!sent.queue) frame.queue = before.queue;
    if (sent.cpu_blocks) frame.cpu_blocks = sent.cpu_blocks.map((i) => data.blocks[i]);
    else if (before) frame.cpu_blocks = sent.cpu_changed ? before.cpu_blocks.slice() : before.cpu_blocks;
    else frame.cpu_blocks = [];
    for (const [id, index] of sent.cpu_changed || []) frame.cpu_blocks[id] = data.blocks[index];
    const swapped = sent.cpu_queue_change;
    if (swapped) frame.cpu_queue = [...swapped.head, ...before.cpu_queue.filter((id) => !swapped.out.includes(id)), ...swapped.tail];
    else if (!sent.cpu_queue) frame.cpu_queue = before ? before.cpu_queue : [];
    frame.cacheSince = sent.cache || sent.cache_changes ? this.frames.length : before.cacheSince; // the frame in which the prefix cache last changed
    if (sent.requests) frame.requests = sent.requests.map((i) => requests[i]);
    if (sent.rows) frame.rows = sent.rows.map((i) => data.rows[i]);
    for (const name of ["row_notes", "row_reads"]) if (sent[name]) frame[name] = sent[name].map((i) => data.row_notes[i]);
    for (const request of sent.requests ? frame.requests : []) {
      if (!this.requestOrder.includes(request.request_id)) this.requestOrder.push(request.request_id);
      if (request.status.startsWith("FINISHED") && !this.endedAt.has(request.request_id)) this.endedAt.set(request.request_id, this.frames.length);
    }
    if (sent.beams) this.choices.push(frame);
    return frame;
  }

  // The prefix cache at a frame: key -> block ids, in order of insertion. Made from the nearest frame that has all of it; every so often one more gets it.
  cacheAt(index) {
    let from = index;
    while (!this.frames[from].cache) from -= 1;
    let cache = this.frames[from].cache;
    if (!(cache instanceof Map)) cache = this.frames[from].cache = new Map(cache);
    if (from === index) return cache;
    const made = new Map(cache);
    for (let at = from + 1; at <= index; at += 1) {
      for (const [key, ids] of this.frames[at].cache_changes || []) {
        if (ids.length) made.set(key, ids);
        else made.delete(key);
      }
    }
    if (index - from >= FRAMES_PER_CACHE) this.frames[index].cache = made;
    return made;
  }

  get last() {
    return this.frames.length - 1;
  }

  token(tokenId) {
    const text = this.vocabulary[tokenId];
    return text === undefined ? `#${tokenId}` : visible(text);
  }

  request(frame, requestId) {
    return frame.requests.find((r) => r.request_id === requestId);
  }

  // ---------------------------------------------------------------- the engine

  get isPaper() {
    return this.header.engine.id === "paper";
  }

  // The block that only stands for “skipped”; the paper's pool has none.
  isNull(id) {
    return id !== null && id === this.header.null_block;
  }

  // What the scenario asks for a request: n, beam_width.
  get groupsAsked() {
    return this.header.asked || {};
  }

  // Whether sequences are drawn as strips: when there are many, or when all begin with a long prefix.
  get asStrips() {
    return this.isPaper && (this.header.num_sequences > WIDEST_ROWS || this.header.prefixes.length > 0);
  }

  // The provider's prefix that a request begins with, or null.
  prefixOf(request) {
    const asked = this.groupsAsked[this.groupName(request)];
    return (asked && asked.prefix) || null;
  }

  get hasBeams() {
    return Object.values(this.groupsAsked).some((asked) => asked.beam_width) || this.choices.length > 0;
  }

  // The selections of beam searches up to a frame, and the newest of them.
  choicesUpTo(index) {
    return this.choices.filter((frame) => frame.seq <= this.frames[index].seq);
  }

  choiceBefore(index) {
    const found = this.choicesUpTo(index);
    return found.length ? found[found.length - 1] : null;
  }

  // The name of a request, or of the sequence group that a sequence belongs to.
  groupName(request) {
    return request.sequence_group || request.request_id;
  }

  // ---------------------------------------------------------------- KV-cache groups

  get groups() {
    return this.header.groups;
  }

  get hasGroups() {
    return this.groups.length > 1;
  }

  // Tokens that one entry of a group's block table stands for, on all ranks together.
  span(groupId) {
    const group = this.groups[groupId] || this.groups[0];
    return group.block_size * (group.is_state ? 1 : this.header.ranks.size);
  }

  // The group that a block belongs to: that of its owner, or that of its hash; -1 for a block that nobody has used yet.
  groupOf(block) {
    if (block.owners.length) return block.owners[0].group_id;
    if (block.block_hashes.length) return Number(block.block_hashes[0].split(":").pop()) || 0;
    return this.hasGroups ? -1 : 0;
  }

  isState(block) {
    const group = this.groups[this.groupOf(block)];
    return group ? group.is_state : block.num_state_tokens !== null && block.num_state_tokens !== undefined;
  }

  // Where a token's key and value lie: logical block, offset in the block on this rank, or on another rank (context parallelism interleaves).
  locate(position, groupId) {
    const { size, rank, interleave } = this.header.ranks;
    const span = this.span(groupId);
    const within = position % span;
    const turn = Math.floor(within / interleave);
    const owner = turn % size;
    return { logical: Math.floor(position / span), offset: Math.floor(turn / size) * interleave + (within % interleave), rank: owner, here: size === 1 || owner === rank };
  }

  // The other way round: the position of the token in slot `offset` of a logical block on this rank.
  positionOf(logical, offset, groupId) {
    const { size, rank, interleave } = this.header.ranks;
    const round = Math.floor(offset / interleave);
    return logical * this.span(groupId) + (size === 1 ? offset : (round * size + rank) * interleave + (offset % interleave));
  }

  // ---------------------------------------------------------------- slots

  // What lies in a slot: {text, written, generated, position}. A slot that a scheduled token will fill in this step has a text but is not written yet.
  slot(frame, block, offset) {
    const owner = block.owners[0];
    const request = owner && this.request(frame, owner.request_id);
    const position = owner ? this.positionOf(owner.logical_index, offset, owner.group_id) : -1;
    const generated = Boolean(request) && position >= request.num_prompt_tokens;
    const tokenId = block.token_ids[offset];
    if (tokenId !== null && tokenId !== undefined) return { text: this.token(tokenId), written: true, generated, position };
    if (request && position < request.num_computed_tokens && position < request.token_ids.length) {
      return { text: this.token(request.token_ids[position]), written: false, generated, position };
    }
    return { text: "", written: false, generated: false, position };
  }

  // How many tokens of its block the main hash covers: {covered, size}, or null if it covers the whole block or there is none, or no slots to cover.
  partialHash(block) {
    if (!block.block_hashes.length || block.num_hash_tokens === null || this.isState(block)) return null;
    const size = this.span(this.groupOf(block));
    const covered = block.num_hash_tokens % size;
    return covered ? { covered, size } : null;
  }

  // The index that one step of `size` leads to: the next event, or the last frame of the neighbouring operation or engine step.
  target(from, direction, size) {
    if (size === "event") return Math.min(Math.max(from + direction, 0), this.last);
    const key = size === "operation" ? (f) => f.op_index : (f) => f.step;
    const frames = this.frames;
    if (direction > 0) {
      let index = Math.min(from + 1, this.last);
      while (index < this.last && key(frames[index + 1]) === key(frames[index])) index += 1;
      return index;
    }
    let index = from;
    while (index > 0 && key(frames[index]) === key(frames[from])) index -= 1;
    return index;
  }
}

// The rows of requests put together from their bases, which come before them, and what differs.
function wholeRows(rows) {
  const whole = [];
  for (const row of rows) {
    const { base, more, ...own } = row;
    const made = base === undefined ? row : Object.assign({}, whole[base], own);
    for (const name in more || {}) made[name] = whole[base][name].concat(more[name]);
    whole.push(made);
  }
  return whole;
}
