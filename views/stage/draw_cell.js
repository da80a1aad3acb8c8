// One physical block: its head, and either its slots or its recurrent state. Made once, afterwards only changed where its block changed.
// A cell comes in three forms: "words" (a word in each slot), "line" (one line of words and small squares) and "squares".
const HEAD_FONT = 12.5;

class Cell {
  // `name`: how it is known to the rest of the stage, if not by its number.
  constructor(parent, id, x, y, shape, isNull = false, name = id) {
    this.id = id;
    this.y = y;
    this.shape = shape;
    this.isNull = isNull;
    this.group = svg(parent, "g", { class: `cell ${shape.form}`, transform: `translate(${x},${y})`, "data-block": name, tabindex: isNull ? null : 0 });
    svg(this.group, "rect", { width: shape.width, height: shape.height, rx: shape.form === "words" ? 9 : 7, class: "box" });
    this.number = svg(this.group, "text", { x: shape.inset + 2, y: shape.headLine, class: "id" }, String(id));
    if (isNull) return this.drawNull();
    this.state = svg(this.group, "text", { y: shape.headLine - 0.5, class: "state" });
    this.hash = svg(this.group, "text", { y: shape.headLine, class: "hash", "text-anchor": "end" });
    this.chips = svg(this.group, "g");
    this.contents = svg(this.group, "g");
    this.slots = [];
    this.signature = "";
  }

  drawNull() {
    const { form, width, height } = this.shape;
    this.group.classList.add("null");
    if (form === "squares") return;
    this.number.textContent = "0 · null";
    let words = wrapWords("stands for “skipped”; never taken, never freed", width - 16, HEAD_FONT);
    if (42 + words.length * 16 > height + 8) words = wrapWords("never taken, never freed", width - 16, HEAD_FONT);
    if (42 + words.length * 16 > height + 8) words = wrapWords("skipped", width - 16, HEAD_FONT);
    words.forEach((line, i) => svg(this.group, "text", { x: 10, y: this.shape.headLine + 21 + i * 16, class: "null-text" }, line));
  }

  // Everything that the cell shows, drawn again only if something of it changed. `before`: the reference count that an event has just changed, else null.
  draw(recording, frame, block, before = null) {
    const owner = block.owners.length ? recording.request(frame, block.owners[0].request_id) : null; // what its slots hold may follow from its owner
    if (block === this.block && owner === this.owner && before === this.before && recording.traceId === this.traceId) return;
    Object.assign(this, { block, owner, before, traceId: recording.traceId });
    const owners = [...new Set(block.owners.map((o) => o.request_id))];
    const isState = recording.isState(block);
    const slots = block.token_ids.map((_, offset) => recording.slot(frame, block, offset));
    const colours = owners.map((o) => requestColour(recording, o));
    const signature = JSON.stringify([block.ref_cnt, before, block.block_hashes, block.num_hash_tokens, owners, block.pins, slots, colours, isState, block.num_state_tokens, recording.groupOf(block)]);
    if (signature === this.signature) return;
    this.signature = signature;
    const cached = block.block_hashes.length > 0;
    const free = block.ref_cnt === 0;
    const colour = owners.length === 1 ? colours[0] : owners.length ? "var(--shared)" : "var(--line)";
    this.group.style.setProperty("--owner", colour);
    this.group.classList.toggle("free", free);
    this.group.classList.toggle("cached", free && cached);
    this.group.classList.toggle("pinned", isPinnedForCopy(block));
    this.drawHead(recording, owners, block);
    if (isState) this.drawState(block);
    else this.drawSlots(recording, block, slots);
    hint(this.group, describeBlock(recording, frame, block));
  }

  // The head, from right to left: who holds the block, its hash mark, its state. What has no room is left to the hint: first words, then letters.
  drawHead(recording, owners, block) {
    const { form, width, inset, headLine } = this.shape;
    const radius = form === "words" ? 10 : 7;
    const pitch = radius * 2 + 3;
    const right = width - inset + 1;
    const left = inset + 2 + measure(String(this.id), `700 ${this.shape.idFont}px ${fontFamily}`) + 6;
    const mark = hashMark(recording, block, form);
    const hashWidth = mark ? measure(mark, `700 13px ${fontFamily}`) + 5 : 0;
    const count = recording.isPaper && (block.ref_cnt || this.before !== null) ? measure(this.before === null ? `×${block.ref_cnt}` : `${this.before}→${block.ref_cnt}`, `700 ${HEAD_FONT}px ${fontFamily}`) + 8 : 0;
    const room = Math.max(Math.floor((right - left - hashWidth - count) / pitch), form === "words" ? 1 : 0); // with reference counts, these come first
    const names = owners.map((o) => ({ letter: requestLetter(o), colour: requestColour(recording, o) }));
    if (!owners.length && block.pins.length) names.push(isPinnedForCopy(block) ? { letter: "→", colour: "var(--mute)" } : { letter: "S", colour: "var(--mute)" });
    const most = Math.min(room, 3);
    if (!most) names.length = 0; // no room beside a long number: the border's colour says whose the block is
    if (names.length > most) {
      const hidden = names.length - most + 1;
      names.splice(most - 1, hidden, { letter: most === 1 ? String(hidden) : `+${hidden}`, colour: "var(--mute)" });
    }
    const end = right - names.length * pitch;
    this.hash.textContent = mark;
    setAttributes(this.hash, { x: end - 2 });
    const space = end - hashWidth - 4 - left;
    const state = stateWords(recording, block, form, this.before).find((words) => measure(words, `600 ${HEAD_FONT}px ${fontFamily}`) <= space) || "";
    this.state.textContent = state;
    setAttributes(this.state, { x: left, class: `state${block.ref_cnt > 1 || this.before !== null ? " strong" : ""}${this.before !== null ? " changed" : ""}` });
    this.chips.replaceChildren();
    names.reverse().forEach((name, i) => {
      const x = right - radius - i * pitch;
      svg(this.chips, "circle", { cx: x, cy: headLine - 5.5, r: radius, style: `fill:${name.colour}` });
      const long = name.letter.length > 2 ? { textLength: radius * 1.7, lengthAdjust: "spacingAndGlyphs" } : {};
      svg(this.chips, "text", { x, y: headLine - 1.2, class: "letter", "text-anchor": "middle", ...long }, name.letter);
    });
  }

  // ---------------------------------------------------------------- recurrent state

  drawState(block) {
    this.makeContents("state");
    const { width, height, inset, top } = this.shape;
    const tokens = block.num_state_tokens;
    const has = tokens !== null && tokens !== undefined;
    const box = { x: inset, y: top, width: width - 2 * inset, height: height - top - inset };
    svg(this.contents, "rect", { ...box, rx: 8, class: "state-box" });
    const font = `600 12px ${fontFamily}`;
    const fits = (lines) => lines.length * 14 <= box.height && lines.every((line) => measure(line, font) <= box.width - 4);
    if (!has && !block.ref_cnt) return;
    const words = has ? `state after ${plural(tokens, "token")}` : "no state yet";
    const choices = has ? [[words], wrapWords(words, box.width - 6, 12), ["state", `after ${tokens}`], [`after ${tokens}`], [`@${tokens}`]] : [[words], wrapWords(words, box.width - 6, 12), ["–"]];
    const lines = choices.find(fits) || [];
    lines.forEach((line, i) => svg(this.contents, "text", { x: box.x + box.width / 2, y: box.y + box.height / 2 + 4.2 + (i - (lines.length - 1) / 2) * 14, "text-anchor": "middle", class: "state-text" }, line));
    setAttributes(this.contents, { class: `state-block${has ? " filled" : ""}` });
  }

  makeContents(kind) {
    this.kind = kind;
    this.contents.replaceChildren();
    this.slots = [];
    setAttributes(this.contents, { class: null });
  }

  // ---------------------------------------------------------------- slots

  drawSlots(recording, block, slots) {
    if (this.kind !== slots.length) this.makeSlots(recording, slots.length);
    slots.forEach((content, offset) => this.drawSlot(this.slots[offset], content));
    const partial = recording.partialHash(block);
    const whole = this.shape.form === "squares" && block.block_hashes.length ? slots.length : 0;
    this.drawCover(partial ? partial.covered : whole);
    if (this.shape.form !== "line") return;
    const text = slots.map((s) => s.text).filter(Boolean).join(" ");
    this.line.textContent = fitText(text, this.shape.width - 2 * this.shape.inset, 12, 500);
    const groupId = recording.groupOf(block);
    this.label.textContent = recording.hasGroups && groupId >= 0 ? fitLabel(recording.groups[groupId].label, (this.labelAbove ? this.shape.width - 2 * this.shape.inset : this.labelWidth) - 2) : "";
  }

  makeSlots(recording, count) {
    this.makeContents(count);
    const { form, width, height, inset, top } = this.shape;
    const gap = form === "words" ? 2.6 : 1.5;
    let area = { x: inset, y: top, width: width - 2 * inset, height: height - top - inset };
    if (form === "line") {
      this.line = svg(this.contents, "text", { x: inset, y: top + 9, class: "line-words" });
      const labels = recording.hasGroups ? recording.groups.filter((g) => !g.is_state).map((g) => measure(g.label, `500 11.6px ${fontFamily}`) + 5) : [];
      const widest = Math.max(0, ...labels);
      this.labelAbove = widest > area.width / 2 && height >= 62; // a long name has a line of its own, and the slots below it
      this.labelWidth = this.labelAbove ? 0 : Math.min(widest, Math.max(area.width / 2, 46));
      this.label = svg(this.contents, "text", { x: inset, y: this.labelAbove ? top + 23 : height - 6, class: "group-label" });
      const down = this.labelAbove ? 28 : 14;
      area = { x: inset + this.labelWidth, y: top + down, width: area.width - this.labelWidth, height: area.height - down };
    }
    const most = form === "line" && this.labelWidth ? 4 : count > 16 ? 16 : 8;
    const perRow = form === "words" ? slotsPerRow(count, area.width) : Math.max(Math.min(count, most), 1);
    const rows = Math.max(Math.ceil(count / perRow), 1);
    const slotWidth = (area.width - gap * (perRow - 1)) / perRow;
    const slotHeight = (area.height - gap * (rows - 1)) / rows;
    const words = form === "words" && slotHeight >= 13 && slotWidth >= 18;
    for (let offset = 0; offset < count; offset += 1) {
      const x = area.x + (offset % perRow) * (slotWidth + gap);
      const y = area.y + Math.floor(offset / perRow) * (slotHeight + gap);
      const slot = svg(this.contents, "g", { class: "slot" });
      svg(slot, "rect", { x, y, width: slotWidth, height: slotHeight, rx: form === "words" ? 5 : 2 });
      const lines = Math.max(Math.floor(slotHeight / 14), 1);
      this.slots.push({ slot, left: x, bottom: y + slotHeight, outer: slotWidth, words: words ? svg(slot, "g") : null, width: slotWidth - 3, x: x + slotWidth / 2, y: y + slotHeight / 2 + 4.2, lines });
    }
    this.cover = svg(this.contents, "path", { class: "cover" });
  }

  drawSlot(part, content) {
    const state = content.text ? (content.written ? "filled" : "pending") : "";
    setAttributes(part.slot, { class: `slot ${state}${content.generated ? " generated" : ""}` });
    if (!part.words || part.shown === `${content.text}/${content.generated}`) return;
    part.shown = `${content.text}/${content.generated}`;
    part.words.replaceChildren();
    const weight = content.generated ? 700 : 500;
    const lines = content.text ? wrapToken(content.text, part.width, 12, weight, part.lines) : [];
    lines.forEach((line, i) => {
      const long = measure(line, `${weight} 12px ${fontFamily}`) > part.width;
      const y = part.y + (i - (lines.length - 1) / 2) * 13;
      svg(part.words, "text", { x: part.x, y, "text-anchor": "middle", textLength: long ? part.width : null, lengthAdjust: long ? "spacingAndGlyphs" : null }, line);
    });
  }

  // A violet line under the slots that a hash covers.
  drawCover(covered) {
    setAttributes(this.cover, { d: this.slots.slice(0, covered).map((p) => `M${p.left} ${p.bottom - 1}h${p.outer}`).join("") });
  }
}

// The name of a group in little room.
function fitLabel(label, width) {
  const short = measure(label, `500 11.6px ${fontFamily}`) > width ? shortLabel(label) : label;
  return fitText(short, width, 11.6, 500);
}

// As many slots side by side as can hold a word; a narrow block of four has two rows of two.
function slotsPerRow(count, width) {
  if (count > 16) return 8;
  if (count > 4) return 4;
  return count === 4 && width / 4 < 33 ? 2 : Math.max(count, 1);
}

function isPinnedForCopy(block) {
  return block.pins.some((pin) => pin.includes("copy"));
}

// “#”, or “#4/8” when the hash ends inside the block, and “+1” for every further hash. The smallest cells have no room: a violet line says it.
function hashMark(recording, block, form) {
  if (!block.block_hashes.length || form === "squares") return "";
  const partial = recording.partialHash(block);
  const more = block.block_hashes.length > 1 && form === "words" ? `+${block.block_hashes.length - 1}` : "";
  return partial ? `#${partial.covered}/${partial.size}${more}` : `#${more}`;
}

// What to say beside a block's number, the longest first.
function stateWords(recording, block, form, before = null) {
  const groupId = recording.groupOf(block);
  const group = recording.hasGroups && groupId >= 0 ? ` · ${recording.groups[groupId].label}` : "";
  const cached = block.block_hashes.length > 0;
  if (before !== null) return [`ref ${before} → ${block.ref_cnt}`, `${before} → ${block.ref_cnt}`, `${before}→${block.ref_cnt}`, `×${block.ref_cnt}`];
  if (form === "squares") return [block.ref_cnt ? `×${block.ref_cnt}` : ""];
  if (!block.ref_cnt) return cached ? [`cached, free${group}`, `free${group}`, "cached, free", "free"] : [`free${group}`, "free"];
  const held = isPinnedForCopy(block) ? [`ref ${block.ref_cnt}, held for a copy`, block.owners.length ? `ref ${block.ref_cnt} · copy` : "held for a copy"] : [];
  return [...held, `ref ${block.ref_cnt}${group}`, `ref ${block.ref_cnt}`, `×${block.ref_cnt}`];
}

// The same in one line, what matters most first: it follows the mouse and the focus.
function tellBlock(recording, frame, block) {
  if (block.is_null) return "block 0: the null block, stands for “skipped”";
  const owners = [...new Set(block.owners.map((o) => o.request_id))];
  const groupId = recording.groupOf(block);
  const group = recording.hasGroups && groupId >= 0 ? `, ${recording.groups[groupId].label}` : "";
  const holders = [...owners, ...(block.pins.length ? [isPinnedForCopy(block) ? "held for a copy" : "the scenario"] : [])];
  const words = block.token_ids.map((_, offset) => recording.slot(frame, block, offset).text).filter(Boolean).join(" ");
  const state = recording.isState(block) && block.num_state_tokens !== null ? `state after ${plural(block.num_state_tokens, "token")}` : "";
  const hash = block.block_hashes.length ? `hash ${block.block_hashes.map((key) => key.slice(0, 6)).join(" and ")}` : "";
  const holds = block.ref_cnt ? `ref ${block.ref_cnt} (${holders.join(", ")})` : "free";
  return [`block ${block.block_id}${group}: ${holds}`, state || words || "empty", hash].filter(Boolean).join(" · ");
}

// Everything about a block in words, one fact per line: for hints.
function describeBlock(recording, frame, block) {
  if (block.is_null) return "Block 0, the null block\nstands for “skipped”; never taken, never freed";
  const owners = [...new Set(block.owners.map((o) => o.request_id))];
  const groupId = recording.groupOf(block);
  const parts = [`Block ${block.block_id}, ref_cnt ${block.ref_cnt}`];
  if (recording.hasGroups && groupId >= 0) parts.push(`group ${recording.groups[groupId].label}`);
  if (owners.length) parts.push(`held by ${owners.join(", ")}`);
  if (block.pins.length) parts.push(isPinnedForCopy(block) ? "held for a copy" : `held by the ${block.pins.join(", ")}`);
  if (!block.ref_cnt) parts.push(block.block_hashes.length ? "free, but still found by its hash" : "free");
  if (recording.isState(block)) {
    const tokens = block.num_state_tokens;
    parts.push(tokens === null || tokens === undefined ? "no state yet" : `recurrent state after ${plural(tokens, "token")}`);
  }
  const slots = block.token_ids.map((_, offset) => recording.slot(frame, block, offset));
  const words = slots.filter((s) => s.written).map((s) => s.text);
  if (words.length) parts.push(`tokens: ${words.join(" ")}`);
  const pending = slots.filter((s) => s.text && !s.written).map((s) => s.text);
  if (pending.length) parts.push(`to be written in this step: ${pending.join(" ")}`);
  const partial = recording.partialHash(block);
  block.block_hashes.forEach((key, i) => {
    const covers = i === 0 && block.num_hash_tokens ? ` for ${plural(block.num_hash_tokens, "token")}` : "";
    const inside = i === 0 && partial ? `, which end inside: ${partial.covered} of its ${partial.size}` : "";
    parts.push(`${i ? "another " : ""}hash ${key.slice(0, 6)}…${covers}${inside}`);
  });
  return parts.join("\n");
}
