// The frames that the stage holds. They arrive in portions; stepping among them never asks the server.
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
    this.requestOrder = [];
    this.prompts = new Map();
  }

  // Take over a portion; frames that are held already are left alone. Returns whether anything is new.
  append(data) {
    const fresh = data.trace_id !== this.traceId;
    if (fresh) this.clear(data.trace_id);
    const before = this.frames.length;
    this.header = data.header;
    this.notes = data.notes || {};
    Object.assign(this.vocabulary, data.vocabulary);
    if (data.start <= before) {
      for (const sent of data.frames.slice(before - data.start)) this.frames.push(this.resolve(sent, data));
    }
    const grew = this.frames.length !== before || fresh || this.complete !== data.complete;
    this.complete = data.complete;
    this.missing = data.start > before;
    return grew;
  }

  resolve(sent, data) {
    const frame = Object.assign({}, sent);
    frame.blocks = sent.blocks.map((i) => data.blocks[i]);
    frame.requests = sent.requests.map((i) => data.requests[i]);
    for (const request of frame.requests) {
      if (this.requestOrder.includes(request.request_id)) continue;
      this.requestOrder.push(request.request_id);
    }
    return frame;
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

  // What lies in a slot: {text, written, generated, forced}. A slot that a scheduled token will fill in this step has a text but is not written yet.
  slot(frame, block, offset) {
    const owner = (block.owners || [])[0];
    const request = owner && this.request(frame, owner.request_id);
    const position = owner ? owner.logical_index * this.header.block_size + offset : -1;
    const generated = Boolean(request) && position >= request.num_prompt_tokens;
    const tokenId = block.token_ids[offset];
    if (tokenId !== null && tokenId !== undefined) return { text: this.token(tokenId), written: true, generated, position };
    if (request && position < request.num_computed_tokens && position < request.token_ids.length) {
      return { text: this.token(request.token_ids[position]), written: false, generated, position };
    }
    return { text: "", written: false, generated: false, position };
  }

  // The word that a hash covers: a hash is registered before the last token's key and value are written, but it stands for the full block.
  hashedText(frame, block, offset) {
    const slot = this.slot(frame, block, offset);
    const owner = (block.owners || [])[0];
    const request = owner && this.request(frame, owner.request_id);
    return slot.text || (request && slot.position < request.token_ids.length ? this.token(request.token_ids[slot.position]) : "");
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
