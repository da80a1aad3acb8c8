// The manager's tables and the worker's rows, column above column. Differences bear a sign and a sentence; the sentences are the narration's.
const ROW_LABEL = 58; // width of the words before a line of columns
const ROW_CELLS = [27, 30]; // width of a column where the panel is narrow, and where it is not
const LONGEST_RUN = 7; // more neighbouring columns of one kind are cut in the middle
const ROW_SIGNS = { given_up: "≠", changed: "≠", left: "≠", not_told: "+", tail: "┃" };
const ROW_SIGN_WORDS = { given_up: "the manager gave this place up", changed: "the manager has another block here", left: "the request runs no more", not_told: "the worker has not been told yet", tail: "behind the row's end" };

class WorkerRowsPanel {
  constructor(parent) {
    this.body = parent;
    this.parts = [];
  }

  draw(recording, frame) {
    const { width } = sizeOf(this.body);
    const parts = [recording.traceId, frame.rows, frame.requests, frame.row_notes, frame.row_reads, frame.blocks, frame.kind === "row_updated" ? frame : null, width];
    if (parts.every((part, i) => part === this.parts[i])) return;
    this.parts = parts;
    this.body.replaceChildren();
    const seated = new Set(frame.rows.map((row) => row.request_id));
    for (const row of frame.rows) this.drawRequest(recording, frame, recording.request(frame, row.request_id), row, width);
    for (const request of frame.requests) {
      if (!seated.has(request.request_id) && request.block_ids.some((table) => table.length)) this.drawRequest(recording, frame, request, null, width);
    }
    if (!this.body.childElementCount) html(this.body, "p", { class: "muted" }, "The worker has no row yet, and the manager no table.");
  }

  drawRequest(recording, frame, request, row, width) {
    if (!request) return;
    const now = frame.kind === "row_updated" && frame.request === request.request_id;
    const card = html(this.body, "article", { class: `rows-request${now ? " now" : ""}`, "data-request": request.request_id });
    card.style.setProperty("--owner", requestColour(recording, request.request_id));
    const head = html(card, "header");
    drawLetter(head, request);
    if (request.request_id.length > 2) html(head, "b", { class: "name" }, request.request_id);
    html(head, "b", {}, row ? `worker row ${row.row}` : "no row yet");
    html(head, "span", { class: "muted" }, row ? `${plural(request.num_computed_tokens, "token")} computed` : "its whole table comes with the step");
    recording.groups.forEach((group, groupId) => this.drawGroup(card, recording, frame, request, row, groupId, width));
  }

  drawGroup(parent, recording, frame, request, row, groupId, width) {
    const notes = frame.row_notes.filter((note) => note[0] === request.request_id && note[1] === groupId);
    const read = frame.row_reads.find((entry) => entry[0] === request.request_id && entry[1] === groupId) || null;
    const columns = rowColumns(request.block_ids[groupId] || [], row, groupId, notes, read);
    const box = html(parent, "section", { class: "rows-group", "data-group": groupId });
    if (recording.hasGroups) html(box, "h3", { title: recording.groups[groupId].title }, row && !notes.length ? `${recording.groups[groupId].label}: the same in both` : recording.groups[groupId].label);
    const shown = cutRuns(columns);
    this.cell = ROW_CELLS[width < 310 ? 0 : 1];
    const perLine = Math.max(Math.floor((width - ROW_LABEL - 4) / this.cell), 3);
    for (let from = 0; from < shown.length; from += perLine) this.drawLines(box, recording, frame, request, row, shown.slice(from, from + perLine), groupId);
    if (!columns.length) html(box, "p", { class: "muted" }, "nothing in either");
    for (const [, , first, last, kind, text] of notes) {
      const note = html(box, "p", { class: `row-note ${kind}`, "data-first": first, "data-last": last });
      html(note, "b", { "aria-hidden": "true" }, ROW_SIGNS[kind]);
      html(note, "span", {}, text);
    }
    if (!read) return;
    const seen = html(box, "p", { class: "row-note read" });
    html(seen, "b", { "aria-hidden": "true" }, "▲");
    html(seen, "span", {}, read[3]);
  }

  // Three or four lines of cells: the column's number, the manager's table, the worker's row, and what the kernel read.
  drawLines(box, recording, frame, request, row, columns, groupId) {
    const grid = html(box, "div", { class: "rows-grid", role: "table", "aria-label": `The manager's table and the worker's row of ${request.request_id}` });
    grid.style.gridTemplateColumns = `${ROW_LABEL}px repeat(${columns.length}, ${this.cell - 2}px)`;
    const line = (name, words) => {
      const element = html(grid, "div", { class: `rows-line ${name}`, role: "row" });
      html(element, "span", { class: "rows-label", role: "rowheader" }, words);
      return element;
    };
    const numbers = line("numbers", "column");
    const manager = line("manager", "manager");
    const worker = row ? line("worker", `row ${row.row}`) : null;
    const read = columns.some((c) => c.read) ? line("reads", "read") : null;
    for (const column of columns) {
      const span = recording.span(groupId);
      if (column.hidden) {
        html(numbers, "span", { class: "rows-number" });
        for (const place of [manager, worker]) if (place) html(place, "span", { class: "row-cell cut", title: `${column.hidden} further columns of this kind` }, "…");
        if (read) html(read, "span");
        continue;
      }
      html(numbers, "span", { class: `rows-number${column.kind === "tail" ? " tail" : ""}`, title: `positions ${column.at * span} to ${(column.at + 1) * span - 1}` }, String(column.at));
      this.drawCell(manager, recording, frame, request, column, column.table, column.kind === "not_told" ? "not_told" : "", groupId);
      if (worker) this.drawCell(worker, recording, frame, request, column, column.row, column.kind === "not_told" ? "missing" : column.kind || "", groupId);
      if (read) html(read, "span", { class: "row-read", title: column.read ? "read in this step" : null }, column.read ? "▲" : "");
    }
  }

  drawCell(parent, recording, frame, request, column, id, kind, groupId) {
    if (id === undefined) return html(parent, "span", { class: `row-cell nothing ${kind}`, role: "cell", "data-column": column.at }, kind === "missing" ? "·" : "");
    const isNull = recording.isNull(id);
    const sign = kind === "tail" ? "" : ROW_SIGNS[kind];
    const title = [kind in ROW_SIGN_WORDS ? ROW_SIGN_WORDS[kind] : "", isNull ? "the null block" : describeBlock(recording, frame, frame.blocks[id])].filter(Boolean).join("\n");
    const cell = html(parent, "span", { class: `row-cell${isNull ? " null" : ""} ${kind}`, role: "cell", "data-column": column.at, "data-block": isNull ? null : id, title });
    cell.classList.toggle("end", Boolean(column.end));
    html(cell, "b", {}, isNull ? "∅" : String(id));
    if (sign) html(cell, "i", { class: "sign" }, sign);
    const other = kind in ROW_SIGNS && kind !== "not_told" && !isNull ? otherOwner(frame.blocks[id], request.request_id, groupId) : null;
    if (other) {
      const letter = html(cell, "i", { class: "whose" }, requestLetter(other));
      letter.style.setProperty("--whose", requestColour(recording, other));
    }
    return cell;
  }
}

// Somebody else who holds a block that a row still names; the same request in another group counts, too.
function otherOwner(block, requestId, groupId) {
  const other = block.owners.find((o) => o.request_id !== requestId || o.group_id !== groupId);
  return other ? other.request_id : null;
}

// One entry per column: {at, table, row, kind, read}. `kind` is null where both say the same.
function rowColumns(table, row, groupId, notes, read) {
  const ids = row ? row.block_ids[groupId] || [] : [];
  const tail = row && row.stale_block_ids.length ? row.stale_block_ids[groupId] : [];
  const said = [...ids, ...tail];
  return Array.from({ length: Math.max(table.length, said.length) }, (_, at) => {
    const note = notes.find(([, , first, last]) => at >= first && at <= last);
    return { at, end: at === ids.length && tail.length > 0, table: table[at], row: said[at], kind: note ? note[4] : null, read: Boolean(read) && at < ids.length && read[2].includes(ids[at]) };
  });
}

// Long runs of columns of one kind without their middle, in the place of which stands {hidden: number}.
function cutRuns(columns) {
  const shown = [];
  for (let start = 0; start < columns.length; ) {
    let end = start + 1;
    while (end < columns.length && columns[end].kind === columns[start].kind && columns[end].read === columns[start].read) end += 1;
    const run = columns.slice(start, end);
    if (run.length > LONGEST_RUN) shown.push(...run.slice(0, 3), { hidden: run.length - 5 }, ...run.slice(-2));
    else shown.push(...run);
    start = end;
  }
  return shown;
}

// Columns in which a row says something else than its table and will go on doing so, over all requests and groups: not what the next step brings in line.
function numDifferences(frame) {
  const lasting = frame.row_notes.filter((note) => !["not_told", "left"].includes(note[4]));
  return lasting.reduce((sum, [, , first, last]) => sum + last - first + 1, 0);
}

function rowsLegend(frame) {
  const kinds = new Set(frame.row_notes.map((note) => note[4]));
  const marks = ["∅ null", kinds.size ? "≠ they differ" : "", kinds.has("not_told") ? "+ not told yet" : "", kinds.has("tail") ? "┃ the row's end" : "", frame.row_reads.length ? "▲ read in this step" : ""];
  return marks.filter(Boolean).join(" · ");
}
