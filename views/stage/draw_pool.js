// The grid of physical blocks, and the copies between them.
const POOL_GAP = 10;
const CELL_GAP = 6;

class PoolPanel {
  constructor(parent, title) {
    this.body = parent;
    this.told = html(title, "span", { class: "told", "aria-live": "polite" });
    this.picture = svg(parent, "svg", { class: "picture", role: "img" });
    this.grid = svg(this.picture, "g");
    this.copies = svg(this.picture, "g", { class: "copies" });
    this.cells = [];
    this.layoutKey = "";
  }

  layout(recording) {
    const count = recording.header.num_blocks;
    const sizes = recording.groups.filter((g) => !g.is_state).map((g) => g.block_size);
    const size = Math.max(1, ...sizes);
    const { height, ...inner } = sizeOf(this.body);
    const width = inner.width - 1;
    const key = `${recording.traceId}/${count}/${size}/${width}/${height}`;
    if (key === this.layoutKey) return;
    this.layoutKey = key;
    this.grid.replaceChildren();
    const shape = poolShape(count, size, width, height);
    this.shape = shape;
    setAttributes(this.picture, { width, height: shape.rows * (shape.height + shape.gap) - shape.gap + 4 });
    this.cells = Array.from({ length: count }, (_, id) => {
      const x = 1 + (id % shape.columns) * (shape.width + shape.gap);
      const y = 2 + Math.floor(id / shape.columns) * (shape.height + shape.gap);
      return Object.assign(new Cell(this.grid, id, x, y, shape, recording.isNull(id)), { x });
    });
  }

  draw(recording, frame, previous) {
    this.layout(recording);
    this.recording = recording;
    this.frame = frame;
    const now = new Set(frame.now.blocks);
    let used = 0;
    frame.blocks.forEach((block, id) => {
      const cell = this.cells[id];
      if (!cell) return;
      cell.group.classList.toggle("now", now.has(id));
      if (block.ref_cnt > 0 && !block.is_null) used += 1;
      if (!block.is_null) cell.draw(recording, frame, block, recording.isPaper ? countBefore(block, previous && previous.blocks[id]) : null);
    });
    this.drawCopies(frame);
    setAttributes(this.picture, { "aria-label": `Physical blocks: ${used} in use, ${frame.queue.length} free${recording.header.null_block === null ? "" : ", and the null block"}.` });
  }

  // What there is to say about the block under the mouse or the focus, beside the panel's title: small cells have no room for words.
  tell(id) {
    const cpu = String(id).startsWith("c");
    const pool = this.frame ? (cpu ? this.frame.cpu_blocks : this.frame.blocks) : [];
    const block = id !== null ? pool[Number(String(id).slice(cpu ? 1 : 0))] : null;
    const text = block ? ` · ${cpu ? "CPU " : ""}${tellBlock(this.recording, this.frame, block)}` : "";
    if (this.told.textContent === text) return;
    this.told.textContent = text;
    this.told.title = block ? describeBlock(this.recording, this.frame, block) : "";
  }

  // An arrow from source to destination for every copy that is queued, and for those that have just been done.
  drawCopies(frame) {
    const [read, written, tokens] = frame.now.state || [];
    const goesOn = Number.isInteger(read) && read !== written ? [[read, written, "state"]] : [];
    const pairs = [...frame.copies.map(([s, d]) => [s, d, "queued"]), ...frame.now.copied.map(([s, d]) => [s, d, "done"]), ...goesOn];
    const signature = JSON.stringify([pairs, frame.now.state, this.layoutKey]);
    if (signature === this.copiesDrawn) return;
    this.copiesDrawn = signature;
    this.copies.replaceChildren();
    const labels = pairs.map(([source, destination, state], i) => this.drawCopy(this.cells[source], this.cells[destination], i, source, destination, state, tokens));
    if (Number.isInteger(read)) labels.push(this.drawRead(this.cells[read], this.cells[written], tokens));
    this.copies.append(...labels.filter(Boolean)); // above all lines
  }

  // A small flag on the block from which a state was read, on the side where no arrow leaves.
  drawRead(cell, to, tokens) {
    if (!cell || !to) return null;
    const words = cell === to ? `read, then +${tokens}` : "read";
    const half = measure(words, `650 12px ${fontFamily}`) / 2 + 5;
    const { width, height, rows, columns } = this.shape;
    const y = cell.y + height + (Math.floor(cell.id / columns) < rows - 1 ? 1.5 : -4); // in the gap below, where there is one: the state's own words stay free
    const group = svg(this.copies, "g", { class: "copy state label read" });
    const side = cell === to ? 0 : (to.x < cell.x ? 1 : -1) * Math.max(width / 2 - half - 3, 0);
    const x = Math.max(cell.x + width / 2 + side, half);
    svg(group, "rect", { x: x - half, y: y - 7.5, width: 2 * half, height: 15, rx: 7.5 });
    svg(group, "text", { x, y: y + 4, "text-anchor": "middle" }, words);
    return group;
  }

  drawCopy(from, to, index, source, destination, state, tokens) {
    if (!from || !to) return null;
    const route = this.route(from, to, index);
    const tip = route[route.length - 1];
    const up = tip.y < route[route.length - 2].y ? 1 : -1;
    const group = svg(this.copies, "g", { class: `copy ${state}`, "data-from": source, "data-to": destination });
    hint(group, state === "state" ? `the state in block ${source} was read, ${plural(tokens, "token")} further the new one is in block ${destination}` : `copy of block ${source} into block ${destination}: ${state === "queued" ? "queued, the worker does it before anything is written" : "done"}`);
    const line = route.map((p, i) => `${i ? "L" : "M"}${p.x} ${p.y}`).join("");
    svg(group, "path", { d: `${line}M${tip.x - 5} ${tip.y + 6 * up}L${tip.x} ${tip.y}L${tip.x + 5} ${tip.y + 6 * up}` });
    const words = { queued: "copy", done: "copied", state: `+${plural(tokens, "token")}` }[state];
    const half = measure(words, `650 12px ${fontFamily}`) / 2 + 5;
    const way = Math.min(Math.abs(route[2].x - route[1].x) / 2, half + 8) * Math.sign(route[2].x - route[1].x);
    const near = index ? route[2].x - way : route[1].x + way; // copies of one block part at its end: only the first label stands there
    const x = Math.min(Math.max(near, half), sizeOf(this.body).width - half);
    const label = svg(this.copies, "g", { class: `copy ${state} label` });
    svg(label, "rect", { x: x - half, y: route[1].y - 7.5, width: 2 * half, height: 15, rx: 7.5 });
    svg(label, "text", { x, y: route[1].y + 4, "text-anchor": "middle" }, words);
    return label;
  }

  // From cell to cell through the gaps between them, so that no cell's words are crossed. Several copies keep apart a little.
  route(from, to, index) {
    const { width, height, gap, columns, rows } = this.shape;
    const apart = [0, 5, -5][index % 3];
    const rowOf = (cell) => Math.floor(cell.id / columns);
    const below = rowOf(to) > rowOf(from) || (rowOf(to) === rowOf(from) && rowOf(from) < rows - 1);
    const start = { x: from.x + width / 2 + apart, y: below ? from.y + height - 4 : from.y + 4 };
    const channel = below ? from.y + height + gap / 2 + apart / 2.2 : from.y - gap / 2 + apart / 2.2;
    const end = { x: to.x + width / 2 + apart, y: rowOf(to) > rowOf(from) || !below === (rowOf(to) === rowOf(from)) ? to.y + 6 : to.y + height - 6 };
    const far = Math.abs(rowOf(to) - rowOf(from)) > 1;
    if (!far) return [start, { x: start.x, y: channel }, { x: end.x, y: channel }, end];
    const side = to.x + (to.x >= from.x && to.id % columns ? -gap / 2 : width + gap / 2) + apart / 2.2;
    const last = rowOf(to) > rowOf(from) ? to.y - gap / 2 : to.y + height + gap / 2;
    return [start, { x: start.x, y: channel }, { x: side, y: channel }, { x: side, y: last }, { x: end.x, y: last }, end];
  }

  // In a pool that scrolls, bring the first block that just changed into view.
  showFirst(blockIds) {
    if (!blockIds.length || this.body.scrollHeight <= this.body.clientHeight + 8) return;
    const cell = this.cells[blockIds[0]];
    if (!cell) return;
    const { scrollTop, clientHeight } = this.body;
    if (cell.y < scrollTop || cell.y + this.shape.height > scrollTop + clientHeight) this.body.scrollTop = Math.max(cell.y - 20, 0);
  }
}

// The reference count of a block before the event, if the event changed it; the first reference to a free block is no news.
function countBefore(block, before) {
  return before && before !== block && before.ref_cnt !== block.ref_cnt && before.ref_cnt > 0 ? before.ref_cnt : null;
}

// The form and the size of the cells: the richest form in which all blocks are seen at once; if none is, the smallest, which scrolls.
function poolShape(count, size, width, height) {
  const fit = (form, columns, gap, least, most) => {
    const rows = Math.ceil(count / columns);
    const wanted = (height - 6 - gap * (rows - 1)) / rows;
    const cell = { form, columns, rows, gap, width: (width - 2 - gap * (columns - 1)) / columns, height: Math.min(Math.max(least, wanted), most) };
    return { ...cell, fits: wanted >= least, ...FORMS[form] };
  };
  const usual = count <= 9 ? 3 : width > 500 ? 4 : 3;
  for (let columns = usual; columns <= 6; columns += 1) {
    const inner = (width - 2 - POOL_GAP * (columns - 1)) / columns - 14;
    const slotRows = Math.ceil(size / slotsPerRow(size, inner));
    if (inner < 72 || size > 16) break;
    const words = fit("words", columns, POOL_GAP, 34 + Math.max(slotRows * 22, 26) + 6, 36 + slotRows * 60);
    if (words.fits) return words;
    if (count <= 9 && columns === usual) return words; // a small pool always has words
  }
  for (const columns of [5, 6, 7]) {
    if ((width - 2) / columns < 74) break;
    const line = fit("line", columns, CELL_GAP, 54, 74);
    if (line.fits) return line;
  }
  let shape = null;
  for (let columns = Math.max(Math.floor(width / 84), 4); columns <= Math.floor(width / 47); columns += 1) {
    shape = fit("squares", columns, CELL_GAP - 1, 38, 52);
    if (shape.fits) break;
  }
  return shape || fit("squares", 4, CELL_GAP, 38, 52);
}

// Geometry of the three forms: margin inside the cell, base line of the head, where slots begin.
const FORMS = {
  words: { inset: 7, headLine: 21, top: 32, idFont: 15 },
  line: { inset: 6, headLine: 17, top: 24, idFont: 13.5 },
  squares: { inset: 5, headLine: 16, top: 22, idFont: 12 },
};
