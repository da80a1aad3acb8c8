// Requests: their tokens and the paper's block table (logical block, physical block, #filled). One request has room for both; several share rows.
const STATUS_WORDS = {
  WAITING: "waiting", RUNNING: "running", PREEMPTED: "preempted", FINISHED_STOPPED: "finished", FINISHED_LENGTH_CAPPED: "finished", FINISHED_ABORTED: "aborted",
};

class RequestsPanel {
  constructor(parent) {
    this.body = parent;
    this.cards = new Map();
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
    if (!this.empty) this.empty = html(this.body, "p", { class: "muted" }, "No request has arrived yet.");
    this.empty.style.display = frame.requests.length ? "none" : "";
  }

  drawCard(recording, frame, previous, request, compact) {
    let card = this.cards.get(request.request_id);
    if (!card) {
      card = { element: html(this.body, "article", { class: "request" }), signature: "", traceId: recording.traceId };
      this.cards.set(request.request_id, card);
    }
    const rows = this.rows(recording, frame, request);
    const before = previous && recording.request(previous, request.request_id);
    const taken = before ? new Set((request.block_ids[0] || []).slice((before.block_ids[0] || []).length)) : new Set();
    const now = new Set(frame.now.blocks.filter((id) => frame.kind === "block_cached" || taken.has(id)));
    const signature = JSON.stringify([request, rows, [...now], compact, frame.kind === "token_sampled" && frame.request === request.request_id]);
    if (signature === card.signature) return;
    card.signature = signature;
    card.element.replaceChildren();
    card.element.className = `request${compact ? " compact" : ""}`;
    card.element.style.setProperty("--owner", requestColour(recording, request.request_id));
    this.drawHead(card.element, request);
    if (request.status.startsWith("FINISHED")) return this.drawText(card.element, recording, request);
    if (compact) return this.drawRows(card.element, recording, rows, now);
    this.drawTokens(card.element, recording, rows, frame, request);
    this.drawTable(card.element, recording, rows, now);
  }

  // One row per logical block: {logical, physical, filled, hashed, cells}. Tokens beyond the last block stand in rows without a block.
  rows(recording, frame, request) {
    const size = recording.header.block_size;
    const table = request.block_ids[0] || [];
    const count = Math.max(Math.ceil(request.token_ids.length / size), table.length);
    const rows = [];
    for (let logical = 0; logical < count; logical += 1) {
      const physical = logical < table.length ? table[logical] : null;
      const block = physical === null ? null : frame.blocks[physical];
      const cells = [];
      for (let position = logical * size; position < (logical + 1) * size; position += 1) {
        if (position >= request.token_ids.length) {
          cells.push(null);
          continue;
        }
        cells.push({
          position,
          text: recording.token(request.token_ids[position]),
          written: Boolean(block) && block.token_ids[position % size] !== null,
          generated: position >= request.num_prompt_tokens,
          forced: request.forced.includes(position),
        });
      }
      const filled = block ? block.num_filled : 0;
      rows.push({ logical, physical, filled, hashed: Boolean(block) && block.block_hashes.length > 0, cells, size });
    }
    return rows;
  }

  drawHead(parent, request) {
    const head = html(parent, "header");
    html(head, "span", { class: "chip-letter", title: request.request_id }, requestLetter(request.request_id));
    if (request.request_id.length > 2) html(head, "b", { class: "name" }, request.request_id);
    html(head, "b", {}, STATUS_WORDS[request.status] || request.status.toLowerCase());
    const generated = request.token_ids.length - request.num_prompt_tokens;
    const again = request.num_preemptions ? `, preempted ${request.num_preemptions}×` : "";
    html(head, "span", { class: "muted", title: "computed: how far the scheduler has planned; its count moves on before the kernels run" },
      `${request.num_prompt_tokens} prompt + ${generated} generated, ${request.num_computed_tokens} computed${again}`);
  }

  drawText(parent, recording, request) {
    const line = html(parent, "p", { class: "text" });
    const words = (from, to) => request.token_ids.slice(from, to).map((t) => recording.token(t)).join(" ");
    html(line, "span", {}, words(0, request.num_prompt_tokens) + " ");
    html(line, "b", {}, words(request.num_prompt_tokens, request.token_ids.length));
    if (request.forced.length) html(line, "span", { class: "forced-tag" }, "forced");
  }

  tokenTitle(cell) {
    const kv = cell.written ? "key and value are in the block" : "key and value are not written yet";
    const origin = cell.forced ? "dictated by the scenario" : cell.generated ? "generated" : "prompt";
    return `token ${cell.position}: ${cell.text}\n${origin}; ${kv}`;
  }

  tokenClass(cell, just) {
    return `token${cell.written ? "" : " unwritten"}${cell.generated ? " generated" : ""}${cell.forced ? " forced" : ""}${just ? " just" : ""}`;
  }

  drawTokens(parent, recording, rows, frame, request) {
    const grid = html(parent, "div", { class: "tokens" });
    grid.style.setProperty("--columns", Math.min(recording.header.block_size, 4));
    for (const row of rows) {
      for (const cell of row.cells) {
        if (!cell) continue;
        const last = cell.position === request.token_ids.length - 1;
        const just = last && frame.kind === "token_sampled" && frame.request === request.request_id;
        const holder = html(grid, "div", { class: "holder", "data-block": row.physical, title: this.tokenTitle(cell) });
        html(holder, "span", { class: this.tokenClass(cell, just) }, cell.text);
        html(holder, "small", {}, cell.forced ? `${cell.position} forced` : String(cell.position));
      }
    }
  }

  drawTable(parent, recording, rows, now) {
    const table = html(parent, "div", { class: "table", role: "table", "aria-label": "Block table" });
    const head = html(table, "div", { class: "row titles", role: "row" });
    for (const title of ["logical", "", "physical", "#filled"]) html(head, "span", { role: "columnheader" }, title);
    const shown = rows.filter((r) => r.physical !== null);
    if (!shown.length) html(table, "p", { class: "muted" }, "No physical block yet: the table is empty.");
    for (const row of shown) {
      const line = html(table, "div", { class: `row${now.has(row.physical) ? " now" : ""}`, role: "row", "data-block": row.physical });
      html(line, "span", { class: "logical" }, String(row.logical));
      html(line, "span", { class: "arrow", "aria-hidden": "true" }, "⟶");
      html(line, "span", { class: "physical" }, row.physical === 0 ? "null" : String(row.physical));
      const fill = html(line, "span", { class: "fill" });
      for (let i = 0; i < Math.min(row.size, 16); i += 1) html(fill, "i", { class: i < row.filled ? "on" : "" });
      html(line, "span", { class: "number" }, `${row.filled} of ${row.size}`);
      html(line, "span", { class: "hash", title: row.hashed ? "full and hashed: another request may share it" : null }, row.hashed ? "#" : "");
    }
  }

  drawRows(parent, recording, rows, now) {
    for (const row of rows) {
      const line = html(parent, "div", { class: `line${now.has(row.physical) ? " now" : ""}`, "data-block": row.physical });
      html(line, "span", { class: "logical", title: "logical block" }, String(row.logical));
      html(line, "span", { class: "arrow", "aria-hidden": "true" }, "→");
      html(line, "span", { class: `physical${row.physical === null ? " none" : ""}`, title: "physical block" }, row.physical === null ? "–" : row.physical === 0 ? "null" : String(row.physical));
      const cells = html(line, "span", { class: "cells" });
      cells.style.setProperty("--columns", Math.min(row.size, 4));
      for (const cell of row.cells) {
        if (cell) html(cells, "span", { class: this.tokenClass(cell, false), title: this.tokenTitle(cell) }, cell.text);
        else html(cells, "span", { class: "token vacant" });
      }
      html(line, "span", { class: "number", title: "#filled" }, `${row.filled}/${row.size}`);
      html(line, "span", { class: "hash" }, row.hashed ? "#" : "");
    }
  }
}
