// Requests: their tokens and the paper's block table (logical block, physical block, #filled). One request has room for both; several share rows.
const STATUS_WORDS = {
  WAITING: "waiting", RUNNING: "running", PREEMPTED: "preempted", FINISHED_STOPPED: "finished", FINISHED_LENGTH_CAPPED: "finished", FINISHED_ABORTED: "aborted",
};

class RequestsPanel {
  constructor(parent) {
    this.body = parent;
    this.cards = new Map();
    this.groups = new GroupBoxes(parent);
  }

  draw(recording, frame, previous) {
    const compact = frame.requests.length > 1;
    const seen = new Set();
    for (const request of frame.requests) {
      seen.add(request.request_id);
      this.drawCard(recording, frame, previous, request, compact);
    }
    for (const [id, card] of this.cards) {
      if (seen.has(id) && card.traceId === recording.traceId) continue;
      card.element.remove();
      this.cards.delete(id);
      if (seen.has(id)) this.drawCard(recording, frame, previous, recording.request(frame, id), compact);
    }
    this.groups.draw(recording, frame, this.cards);
    if (!this.empty) this.empty = html(this.body, "p", { class: "muted" }, "No request has arrived yet.");
    this.empty.style.display = frame.requests.length ? "none" : "";
  }

  // When the requests do not fit, bring the one that the event is about into view.
  show(requestId) {
    const card = this.cards.get(requestId);
    const { body } = this;
    if (!card || body.scrollHeight <= body.clientHeight + 4) return;
    const target = card.element.offsetHeight > body.clientHeight ? card.element.querySelector(".now") || card.element : card.element;
    const top = body.scrollTop + (target.getBoundingClientRect().top - body.getBoundingClientRect().top) / this.zoom();
    const bottom = top + target.offsetHeight + 4;
    if (bottom > body.scrollTop + body.clientHeight) body.scrollTop = Math.min(bottom - body.clientHeight, top);
    if (top < body.scrollTop) body.scrollTop = top;
  }

  zoom() {
    return this.body.offsetHeight ? this.body.getBoundingClientRect().height / this.body.offsetHeight : 1;
  }

  drawCard(recording, frame, previous, request, compact) {
    let card = this.cards.get(request.request_id);
    if (!card) {
      card = { element: html(this.groups.parent(request), "article", { class: "request" }), signature: "", traceId: recording.traceId };
      this.cards.set(request.request_id, card);
    }
    const lookup = frame.lookup && frame.lookup.request === request.request_id ? frame.lookup : null;
    const about = frame.request === request.request_id ? frame : null; // an event about it may ring one of its places
    const before = previous && recording.request(previous, request.request_id);
    const parts = [request, before, about, compact, frame.rows, sizeOf(this.body).width, ...request.block_ids.flatMap((table) => table.map((id) => frame.blocks[id]))];
    if (card.parts && parts.length === card.parts.length && parts.every((part, i) => part === card.parts[i])) return;
    card.parts = parts;
    const tables = recording.groups.map((_, groupId) => this.places(recording, frame, request, groupId, lookup));
    const row = frame.rows.find((r) => r.request_id === request.request_id) || null;
    const now = this.justChanged(frame, request, before);
    const just = frame.kind === "token_sampled" && frame.request === request.request_id;
    const written = frame.kind === "row_updated" && frame.request === request.request_id;
    const tokens = this.tokens(recording, frame, request);
    const signature = JSON.stringify([request, tables, tokens, row, lookup, [...now], compact, just, written]);
    if (signature === card.signature) return;
    card.signature = signature;
    card.element.replaceChildren();
    const finished = request.status.startsWith("FINISHED");
    card.element.className = `request${compact ? " compact" : ""}${finished ? " finished" : ""}${isDropped(request) ? " dropped" : ""}`;
    card.element.style.setProperty("--owner", requestColour(recording, request.request_id));
    if (recording.isPaper && finished && (request.sequence_group || compact)) return drawEnded(card.element, recording, request, sizeOf(this.body).width);
    if (recording.asStrips && !finished) return drawStrip(card.element, recording, frame, request, tables[0], now, sizeOf(this.body).width);
    this.drawHead(card.element, request);
    if (request.cpu_block_ids.length) return drawCpuTable(card.element, request);
    if (finished) return this.drawText(card.element, recording, request);
    const view = { recording, request, tables, tokens, now, just };
    if (recording.hasGroups) drawLanes(card.element, view);
    else if (compact) this.drawRows(card.element, view);
    else {
      this.drawTokens(card.element, view);
      this.drawTable(card.element, view);
    }
    if (lookup) drawLookup(card.element, recording, lookup);
    if (row && (recording.hasGroups || !compact || !["full", "MLA"].includes(recording.groups[0].label))) drawWorkerRow(card.element, recording, request, row, written);
  }

  // The places of the request's tables that this event changed, as “group/logical block”.
  justChanged(frame, request, before) {
    const now = new Set();
    const ringed = new Set(frame.now.blocks);
    request.block_ids.forEach((table, groupId) => {
      const old = before ? before.block_ids[groupId] || [] : table;
      table.forEach((id, logical) => {
        const cached = ["block_cached", "state_written"].includes(frame.kind) && ringed.has(id) && frame.request === request.request_id;
        if (old[logical] !== id || cached) now.add(`${groupId}/${logical}`);
      });
    });
    return now;
  }

  // One entry per logical block of a group: {logical, physical, ghost, filled, slots, state, hashed, partial}. `ghost`: what a lookup would give.
  places(recording, frame, request, groupId, lookup) {
    const table = request.block_ids[groupId] || [];
    const found = lookup && lookup.groups.find((g) => g.group === groupId);
    const count = Math.max(Math.ceil(request.token_ids.length / recording.span(groupId)), table.length, found ? found.blocks.length : 0);
    return Array.from({ length: count }, (_, logical) => {
      const physical = logical < table.length ? table[logical] : null;
      const ghost = physical === null && found && logical < found.blocks.length ? found.blocks[logical] : null;
      const stop = found ? found.stops.find(([at]) => at === logical) : null;
      const block = physical === null ? null : frame.blocks[physical];
      const real = block !== null && !block.is_null;
      return {
        logical, physical, ghost, isNull: recording.isNull(physical ?? ghost), stop: physical === null && ghost === null && stop ? { block: stop[1], words: stop[2] } : null,
        filled: real ? block.num_filled : 0,
        slots: recording.groups[groupId].is_state ? 0 : real ? block.token_ids.length : recording.groups[groupId].block_size,
        state: real ? block.num_state_tokens ?? null : null,
        refs: real ? block.ref_cnt : 0,
        hashed: real && block.block_hashes.length > 0,
        partial: real ? recording.partialHash(block) : null,
      };
    });
  }

  // Every token with where it stands: {position, text, written, generated, forced, elsewhere}. Written means: in the blocks of the first group that has slots.
  tokens(recording, frame, request) {
    const attention = recording.groups.findIndex((g) => !g.is_state);
    const groupId = Math.max(attention, 0);
    const table = request.block_ids[groupId] || [];
    return request.token_ids.map((tokenId, position) => {
      const at = recording.locate(position, groupId);
      const block = at.logical < table.length ? frame.blocks[table[at.logical]] : null;
      const elsewhere = attention >= 0 && !at.here ? at.rank : null;
      const slot = block && !block.is_null ? block.token_ids[at.offset] : null;
      const passed = position < request.num_computed_tokens && (attention < 0 || (block !== null && (block.is_null || elsewhere !== null)));
      return {
        position, elsewhere, text: recording.token(tokenId),
        written: passed || (slot !== null && slot !== undefined),
        generated: position >= request.num_prompt_tokens,
        forced: request.forced.includes(position),
      };
    });
  }

  drawHead(parent, request) {
    const head = html(parent, "header");
    drawLetter(head, request);
    if (request.request_id.length > 2) html(head, "b", { class: "name" }, request.request_id);
    if (!request.sequence_group || request.status !== "RUNNING") html(head, "b", {}, sequenceStatus(request));
    const generated = request.token_ids.length - request.num_prompt_tokens;
    const again = request.num_preemptions ? `, preempted ${request.num_preemptions}×` : "";
    if (request.sequence_group) return this.drawSequenceHead(head, request, generated);
    html(head, "span", { class: "muted", title: "computed: how far the scheduler has planned; its count moves on before the kernels run" },
      `${request.num_prompt_tokens} prompt + ${generated} generated, ${request.num_computed_tokens} computed${again}`);
  }

  // A sequence of a group in few words: the group's own line says the rest.
  drawSequenceHead(head, request, generated) {
    const words = [`${request.num_prompt_tokens} + ${generated} tokens`, `${request.num_computed_tokens} computed`, request.parent_id ? `from ${request.parent_id}` : ""];
    const title = `${request.num_prompt_tokens} tokens of the prompt and ${generated} generated; key and value of ${request.num_computed_tokens} are computed or planned${request.parent_id ? `; forked from ${request.parent_id}` : ""}`;
    html(head, "span", { class: "muted", title }, words.filter(Boolean).join(" · "));
    if (request.cumulative_logprob !== null) html(head, "span", { class: "logprob", title: "sum of the log-probabilities of its outputs" }, logprobText(request.cumulative_logprob));
  }

  drawText(parent, recording, request) {
    const line = html(parent, "p", { class: "text" });
    const words = (from, to) => request.token_ids.slice(from, to).map((t) => recording.token(t)).join(" ");
    html(line, "span", {}, words(0, request.num_prompt_tokens) + " ");
    html(line, "b", {}, words(request.num_prompt_tokens, request.token_ids.length));
    if (request.forced.length) html(line, "span", { class: "forced-tag" }, "forced");
  }

  drawTokens(parent, { recording, request, tokens, tables, just }) {
    const grid = html(parent, "div", { class: "tokens" });
    grid.style.setProperty("--columns", Math.min(Math.max(recording.span(0), 1), 4));
    const span = recording.span(0);
    for (const cell of tokens) {
      const place = tables[0][Math.floor(cell.position / span)];
      const holder = html(grid, "div", { class: "holder", "data-block": place ? place.physical : null, title: tokenTitle(cell) });
      html(holder, "span", { class: tokenClass(cell, just && cell.position === request.token_ids.length - 1) }, cell.text);
      html(holder, "small", {}, cell.forced ? `${cell.position} forced` : String(cell.position));
    }
  }

  drawTable(parent, { tables, now, recording }) {
    const table = html(parent, "div", { class: "table", role: "table", "aria-label": "Block table" });
    const head = html(table, "div", { class: "row titles", role: "row" });
    const state = recording.groups[0].is_state;
    for (const title of ["logical", "", "physical", state ? "state" : "#filled"]) html(head, "span", { role: "columnheader" }, title);
    const shown = tables[0].filter((place) => place.physical !== null || place.ghost !== null || place.stop);
    if (!shown.length) html(table, "p", { class: "muted" }, "No physical block yet: the table is empty.");
    for (const place of shown) {
      const id = place.physical ?? place.ghost ?? (place.stop ? place.stop.block : null);
      const line = html(table, "div", { class: `row${now.has(`0/${place.logical}`) ? " now" : ""}`, role: "row", "data-block": id });
      html(line, "span", { class: "logical" }, String(place.logical));
      html(line, "span", { class: "arrow", "aria-hidden": "true" }, "⟶");
      html(line, "span", { class: physicalClass(place), title: physicalTitle(place) }, physicalText(place));
      const fill = html(line, "span", { class: `fill${state || place.isNull || place.physical === null ? " wide" : ""}` });
      if (place.stop) html(fill, "span", { title: place.stop.words }, place.stop.words);
      else if (place.isNull || place.physical === null) fill.append(place.isNull ? "nothing is kept here" : "found by its hash");
      else if (state) fill.append(stateText(place));
      else for (let i = 0; i < Math.min(place.slots, 16); i += 1) html(fill, "i", { class: i < place.filled ? "on" : "" });
      if (!fill.classList.contains("wide")) html(line, "span", { class: "number" }, `${place.filled} of ${place.slots}`);
      drawMark(line, recording, place);
    }
  }

  drawRows(parent, { recording, tables, tokens, now }) {
    const span = recording.span(0);
    for (const place of tables[0]) {
      const id = place.physical ?? place.ghost;
      const line = html(parent, "div", { class: `line${now.has(`0/${place.logical}`) ? " now" : ""}`, "data-block": id });
      html(line, "span", { class: "logical", title: "logical block" }, String(place.logical));
      html(line, "span", { class: "arrow", "aria-hidden": "true" }, "→");
      html(line, "span", { class: physicalClass(place), title: physicalTitle(place) }, physicalText(place).replace(" null", ""));
      drawCells(line, tokens.slice(place.logical * span, (place.logical + 1) * span), span);
      html(line, "span", { class: "number", title: "#filled" }, placeNumber(place));
      drawMark(line, recording, place);
    }
  }
}

// At the end of a line: a hash, or in the paper's engine how many refer to the block.
function drawMark(line, recording, place) {
  if (!recording.isPaper) html(line, "span", { class: "hash", title: hashTitle(place) }, place.hashed ? "#" : "");
  else html(line, "span", { class: "refs", title: place.refs > 1 ? `ref count ${place.refs}: shared` : null }, place.refs > 1 ? `×${place.refs}` : "");
}
