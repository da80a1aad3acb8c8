// The grid of physical blocks. One group per block is made once and afterwards only changed where its block changed.
const POOL_GAP = 10;

class PoolPanel {
  constructor(parent) {
    this.body = parent;
    this.picture = svg(parent, "svg", { class: "picture", role: "img" });
    this.cells = [];
    this.layoutKey = "";
  }

  layout(recording) {
    const count = recording.header.num_blocks;
    const size = recording.header.block_size;
    const width = this.body.clientWidth - 1;
    const height = this.body.clientHeight;
    const key = `${recording.traceId}/${count}/${size}/${width}/${height}`;
    if (key === this.layoutKey) return;
    this.layoutKey = key;
    this.cells.forEach((cell) => cell.group.remove());
    this.cells = [];
    const small = count > 48; // no room for words: squares that show what is filled
    const columns = small ? Math.max(Math.floor(width / 84), 4) : count <= 9 ? 3 : width > 500 ? 4 : 3;
    const perRow = small ? Math.min(size, 8) : Math.min(size, 4);
    const rows = Math.ceil(count / columns);
    const slotRows = Math.ceil(size / perRow);
    const cellWidth = (width - 2 - POOL_GAP * (columns - 1)) / columns;
    const least = small ? 44 : 34 + slotRows * 24 + 6;
    const wanted = (height - 6 - POOL_GAP * (rows - 1)) / rows;
    const cellHeight = Math.max(least, Math.min(wanted, small ? 52 : 36 + slotRows * 60));
    this.shape = { small, perRow, slotRows, cellWidth, cellHeight, size };
    setAttributes(this.picture, { width, height: rows * (cellHeight + POOL_GAP) - POOL_GAP + 4 });
    for (let id = 0; id < count; id += 1) {
      const x = 1 + (id % columns) * (cellWidth + POOL_GAP);
      const y = 2 + Math.floor(id / columns) * (cellHeight + POOL_GAP);
      this.cells.push(this.makeCell(id, x, y));
    }
  }

  makeCell(id, x, y) {
    const { cellWidth, cellHeight, perRow, slotRows, size, small } = this.shape;
    const group = svg(this.picture, "g", { class: "cell", transform: `translate(${x},${y})`, "data-block": id, tabindex: id === 0 ? null : 0 });
    const cell = { group, y, signature: "" };
    cell.box = svg(group, "rect", { width: cellWidth, height: cellHeight, rx: 9, class: "box" });
    cell.id = svg(group, "text", { x: 10, y: 21, class: "id" }, String(id));
    if (id === 0) {
      group.classList.add("null");
      cell.id.textContent = small ? "0" : "0 · null";
      if (!small) {
        let words = wrapWords("stands for “skipped”; never taken, never freed", cellWidth - 16, 12.5);
        if (42 + words.length * 16 > cellHeight + 8) words = wrapWords("never taken, never freed", cellWidth - 16, 12.5);
        words.forEach((line, i) => svg(group, "text", { x: 10, y: 42 + i * 16, class: "null-text" }, line));
      }
      return cell;
    }
    cell.state = svg(group, "text", { x: 18 + measure(String(id), `700 15px ${fontFamily}`), y: 20.5, class: "state" });
    cell.hash = svg(group, "text", { y: 21, class: "hash", "text-anchor": "end" }, "#");
    cell.chips = svg(group, "g");
    cell.slots = [];
    const top = small ? 28 : 32;
    const gap = small ? 1 : 2.6;
    const slotWidth = (cellWidth - 14 - gap * (perRow - 1)) / perRow;
    const slotHeight = (cellHeight - top - 7 - gap * (slotRows - 1)) / slotRows;
    for (let offset = 0; offset < size; offset += 1) {
      const slotX = 7 + (offset % perRow) * (slotWidth + gap);
      const slotY = top + Math.floor(offset / perRow) * (slotHeight + gap);
      const slot = svg(group, "g", { class: "slot" });
      const rect = svg(slot, "rect", { x: slotX, y: slotY, width: slotWidth, height: slotHeight, rx: small ? 2 : 5 });
      const words = small ? null : svg(slot, "g");
      cell.slots.push({ slot, rect, words, width: slotWidth - 3, x: slotX + slotWidth / 2, y: slotY + slotHeight / 2 + 4.2, lines: Math.max(Math.floor(slotHeight / 14), 1) });
    }
    return cell;
  }

  draw(recording, frame) {
    this.layout(recording);
    const now = new Set(frame.now.blocks);
    frame.blocks.forEach((block, id) => {
      const cell = this.cells[id];
      if (!cell) return;
      cell.group.classList.toggle("now", now.has(id));
      if (id !== 0) this.drawCell(recording, frame, block, cell);
    });
    this.showFirst(frame.now.blocks);
    const used = frame.blocks.filter((b) => b.ref_cnt > 0 && !b.is_null).length;
    setAttributes(this.picture, { "aria-label": `Physical blocks: ${used} in use, ${frame.queue.length} free, and the null block.` });
  }

  drawCell(recording, frame, block, cell) {
    const owners = [...new Set(block.owners.map((o) => o.request_id))];
    const slots = cell.slots.map((_, offset) => recording.slot(frame, block, offset));
    const signature = JSON.stringify([block.ref_cnt, block.block_hashes, owners, block.pins, slots, owners.map((o) => requestColour(recording, o))]);
    if (signature === cell.signature) return;
    cell.signature = signature;
    const cached = block.block_hashes.length > 0;
    const free = block.ref_cnt === 0;
    const colour = owners.length === 1 ? requestColour(recording, owners[0]) : owners.length ? "var(--shared)" : "var(--line)";
    cell.group.style.setProperty("--owner", colour);
    cell.group.classList.toggle("free", free);
    cell.group.classList.toggle("cached", free && cached);
    const state = !free ? `ref ${block.ref_cnt}` : cached ? "cached, free" : "free";
    this.drawHead(recording, cell, owners, block, this.shape.small ? (free ? "" : `×${block.ref_cnt}`) : state);
    slots.forEach((content, offset) => this.drawSlot(cell.slots[offset], content));
    hint(cell.group, this.describe(block, owners, slots));
  }

  // The head of a cell, from right to left: who holds the block, its hash mark, its state. What has no room is left to the hint: first the words, then letters.
  drawHead(recording, cell, owners, block, state) {
    const radius = this.shape.small ? 7 : 10;
    const pitch = radius * 2 + 3;
    const right = this.shape.cellWidth - 6;
    const left = 10 + measure(cell.id.textContent, `700 15px ${fontFamily}`) + 6;
    const hashWidth = block.block_hashes.length ? 14 : 0;
    const room = Math.max(Math.floor((right - left - hashWidth) / pitch), 1);
    const names = owners.map((o) => ({ letter: requestLetter(o), colour: requestColour(recording, o) }));
    if (!owners.length && (block.pins || []).length) names.push({ letter: "S", colour: "var(--mute)" });
    const most = Math.min(room, 3);
    if (names.length > most) {
      const hidden = names.length - most + 1;
      names.splice(most - 1, hidden, { letter: most === 1 ? String(hidden) : `+${hidden}`, colour: "var(--mute)" });
    }
    cell.hash.style.display = hashWidth ? "" : "none";
    const end = right - names.length * pitch;
    setAttributes(cell.hash, { x: end - 2 });
    const fits = left + 2 + measure(state, `600 12.5px ${fontFamily}`) <= end - hashWidth - 2;
    cell.state.textContent = fits ? state : "";
    setAttributes(cell.state, { class: block.ref_cnt > 1 ? "state strong" : "state" });
    this.drawChips(cell, names, radius, pitch);
  }

  drawChips(cell, names, radius, pitch) {
    cell.chips.replaceChildren();
    names.reverse().forEach((name, i) => {
      const x = this.shape.cellWidth - 6 - radius - i * pitch;
      svg(cell.chips, "circle", { cx: x, cy: 15.5, r: radius, style: `fill:${name.colour}` });
      svg(cell.chips, "text", { x, y: 20, class: "letter", "text-anchor": "middle" }, name.letter);
    });
  }

  drawSlot(part, content) {
    const state = content.text ? (content.written ? "filled" : "pending") : "";
    setAttributes(part.slot, { class: `slot ${state}${content.generated ? " generated" : ""}` });
    if (!part.words || part.shown === `${content.text}/${content.generated}`) return;
    part.shown = `${content.text}/${content.generated}`;
    part.words.replaceChildren();
    const weight = content.generated ? 700 : 500;
    const lines = content.text ? wrapToken(content.text, part.width, 11.5, weight, part.lines) : [];
    lines.forEach((line, i) => {
      const long = measure(line, `${weight} 11.5px ${fontFamily}`) > part.width;
      const y = part.y + (i - (lines.length - 1) / 2) * 13;
      svg(part.words, "text", { x: part.x, y, "text-anchor": "middle", textLength: long ? part.width : null, lengthAdjust: long ? "spacingAndGlyphs" : null }, line);
    });
  }

  describe(block, owners, slots) {
    const parts = [`Block ${block.block_id}, ref_cnt ${block.ref_cnt}`];
    if (owners.length) parts.push(`held by ${owners.join(", ")}`);
    else if (block.pins && block.pins.length) parts.push(`held by ${block.pins.join(", ")}`);
    else parts.push(block.block_hashes.length ? "free, but still found by its hash" : "free");
    const words = slots.filter((s) => s.written).map((s) => s.text);
    if (words.length) parts.push(`tokens: ${words.join(" ")}`);
    const pending = slots.filter((s) => s.text && !s.written).map((s) => s.text);
    if (pending.length) parts.push(`to be written in this step: ${pending.join(" ")}`);
    for (const key of block.block_hashes) parts.push(`hash ${key.slice(0, 6)}…`);
    return parts.join("\n");
  }

  // In a pool that scrolls, bring the first block that just changed into view.
  showFirst(blockIds) {
    if (!blockIds.length || this.body.scrollHeight <= this.body.clientHeight + 8) return;
    const cell = this.cells[blockIds[0]];
    if (!cell) return;
    const { scrollTop, clientHeight } = this.body;
    if (cell.y < scrollTop || cell.y + this.shape.cellHeight > scrollTop + clientHeight) this.body.scrollTop = Math.max(cell.y - 20, 0);
  }
}
