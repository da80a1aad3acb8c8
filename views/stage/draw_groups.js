// The paper's sequence groups in the left panel: the sequences of one request stand together under its name; several of them get one strip of blocks each.
const WIDEST_ROWS = 2; // up to so many sequences have their words in rows, more are drawn as strips
const FEW_BEAMS = 5; // beside more living sequences there is no room for dropped ones
const DROPPED_SHOWN = 2; // of the dropped sequences, the newest ones are named, the others counted

class GroupBoxes {
  constructor(body) {
    this.body = body;
    this.boxes = new Map();
  }

  // The element that a sequence's card belongs into: the box of its group, or the panel itself for a request that is one sequence.
  parent(request) {
    const name = request.sequence_group;
    if (!name || name === request.request_id) return this.body;
    if (!this.boxes.has(name)) {
      const element = html(this.body, "section", { class: "group-box", "aria-label": `Sequence group ${name}` });
      const head = html(element, "header");
      const box = { element, name: html(head, "b"), words: html(head, "span", { class: "muted" }), list: html(element, "div", { class: "group-list" }), more: html(element, "p", { class: "muted dropped-more" }) };
      this.boxes.set(name, box);
    }
    return this.boxes.get(name).list;
  }

  clear() {
    this.boxes.forEach((box) => box.element.remove());
    this.boxes.clear();
  }

  // Names, what sharing saves, and how many dropped sequences are not shown one by one.
  draw(recording, frame, cards) {
    for (const [name, box] of this.boxes) {
      const members = frame.requests.filter((r) => r.sequence_group === name);
      box.element.style.display = members.length ? "" : "none";
      if (!members.length) continue;
      const dropped = members.filter(isDropped).sort((a, b) => recording.endedAt.get(b.request_id) - recording.endedAt.get(a.request_id));
      const living = members.filter((r) => !r.status.startsWith("FINISHED")).length;
      const hidden = dropped.slice(living > FEW_BEAMS ? 0 : DROPPED_SHOWN);
      for (const request of members) cards.get(request.request_id).element.style.display = hidden.includes(request) ? "none" : "";
      const words = groupWords(recording, members, dropped.length);
      setText(box.name, name);
      setText(box.words, words);
      box.words.title = words;
      setText(box.more, hidden.length && hidden.length < dropped.length ? `and ${hidden.length} dropped before` : "");
      box.element.classList.toggle("finished", members.every((r) => r.status.startsWith("FINISHED")));
    }
  }
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function isDropped(request) {
  return request.status.startsWith("FINISHED") && request.status.includes("DROP");
}

function groupWords(recording, members, dropped) {
  const living = members.filter((r) => !r.status.startsWith("FINISHED")).length;
  const asked = recording.groupsAsked[members[0].sequence_group];
  const kind = asked && asked.beam_width ? `${asked.beam_width} beams` : living ? plural(living, "sample") : "";
  const again = Math.max(...members.map((r) => r.num_preemptions));
  return [kind, sharingWords(members), living ? "" : "finished", dropped ? `${dropped} dropped` : "", again ? `preempted${again > 1 ? ` ${again}×` : ""}` : ""].filter(Boolean).join(" · ");
}

// How many blocks the group holds, and how many it would hold if nothing were shared.
function sharingWords(members) {
  const tables = members.map((r) => (r.cpu_block_ids.length ? r.cpu_block_ids : r.block_ids[0] || []));
  const all = tables.reduce((sum, table) => sum + table.length, 0);
  const distinct = new Set(tables.flat()).size;
  return all > distinct ? `${plural(distinct, "block")} instead of ${all}` : "";
}

const SEQUENCE_WORDS = { SWAPPED: "swapped out", PREFIX_KEPT: "prefix, kept" };

function sequenceStatus(request) {
  if (isDropped(request)) return "dropped";
  return SEQUENCE_WORDS[request.status] || STATUS_WORDS[request.status] || request.status.toLowerCase().replaceAll("_", " ");
}

function logprobText(value) {
  return value === null || value === undefined ? "" : value.toFixed(2).replace("-0.00", "0.00").replace("-", "−");
}

function outputWords(recording, request) {
  return request.token_ids.slice(request.num_prompt_tokens).map((t) => recording.token(t)).join(" ");
}

function drawLetter(parent, request) {
  const letter = requestLetter(request.request_id);
  html(parent, "span", { class: `chip-letter${letter.length > 2 ? " long" : ""}`, title: request.request_id }, letter);
}

// Whether a prefix is simply called “prefix”, so that its name need not be said beside what it is.
function isPlainPrefix(name) {
  return name.toLowerCase() === "prefix";
}

// The end of a text, as much as has room: of outputs the newest say most.
function lastWords(text, width) {
  const font = `650 12.5px ${fontFamily}`;
  if (measure(text, font) <= width) return text;
  const words = text.split(" ");
  let from = words.length - 1;
  while (from > 0 && measure(`… ${words.slice(from - 1).join(" ")}`, font) <= width) from -= 1;
  return from ? `… ${words.slice(from).join(" ")}` : text;
}

// The prompt's own words: all of them as long as there is no output, afterwards only what follows a shared prefix.
function ownPrompt(recording, frame, request, outputs) {
  const prefix = recording.request(frame, recording.prefixOf(request));
  if (!prefix && outputs) return "";
  return request.token_ids.slice(prefix ? prefix.num_prompt_tokens : 0, request.num_prompt_tokens).map((t) => recording.token(t)).join(" ");
}

// One line: what a finished or dropped sequence said.
function drawEnded(card, recording, request, width) {
  const line = html(card, "p", { class: "ended" });
  drawLetter(line, request);
  html(line, "b", {}, sequenceStatus(request));
  const words = outputWords(recording, request);
  html(html(line, "span", { class: "ended-words", title: words }), "span", { class: request.forced.length ? "forced" : null }, lastWords(words, width - 160));
  html(line, "span", { class: "logprob", title: "sum of the log-probabilities of its outputs" }, logprobText(request.cumulative_logprob));
}

// A sequence as a head line and a strip of its blocks.
function drawStrip(card, recording, frame, request, places, now, width) {
  const head = html(card, "header", { class: "strip-head" });
  drawLetter(head, request);
  const kept = request.status === "PREFIX_KEPT";
  if (request.request_id.length > 3 && !(kept && isPlainPrefix(request.request_id))) html(head, "b", { class: "name" }, request.request_id);
  if (request.status !== "RUNNING") html(head, "b", {}, sequenceStatus(request));
  const words = outputWords(recording, request);
  const own = ownPrompt(recording, frame, request, words);
  const text = html(head, "span", { class: "strip-words", title: `${own} ${words}${request.forced.length ? "\nsome of these tokens are dictated by the scenario" : ""}` }, own ? `${own} ` : "");
  html(text, "b", { class: request.forced.length ? "forced" : null }, lastWords(words, width - 177 - (own ? 55 : 0) - (request.status === "RUNNING" ? 0 : 88)));
  const prefix = recording.prefixOf(request);
  if (prefix) html(head, "span", { class: "muted", title: `its prompt begins with the provider's prefix ${prefix}` }, isPlainPrefix(prefix) ? "after the prefix" : `after ${prefix}`);
  else if (request.parent_id) html(head, "span", { class: "muted", title: `${request.request_id} was forked from ${request.parent_id}` }, `from ${request.parent_id}`);
  html(head, "span", { class: "logprob", title: "sum of the log-probabilities of its outputs" }, logprobText(request.cumulative_logprob));
  if (request.cpu_block_ids.length) return drawCpuTable(card, request);
  const strip = html(card, "div", { class: "strip", role: "list", "aria-label": `Block table of ${request.request_id}` });
  for (const place of places) if (place.physical !== null) drawPiece(strip, place, now.has(`0/${place.logical}`));
  if (!strip.childElementCount) html(strip, "span", { class: "muted" }, "no block");
}

function drawPiece(strip, place, isNow) {
  const shared = place.refs > 1;
  const title = [`logical block ${place.logical} → block ${place.physical}`, `${place.filled} of ${place.slots} slots filled`, shared ? `ref count ${place.refs}: shared` : ""].filter(Boolean).join("\n");
  const piece = html(strip, "span", { class: `piece${shared ? " shared" : ""}${isNow ? " now" : ""}`, role: "listitem", "data-block": place.physical, title });
  html(piece, "b", {}, String(place.physical));
  if (shared) html(piece, "small", {}, `×${place.refs}`);
  const bar = html(html(piece, "span", { class: "bar-of-slots" }), "i", {});
  bar.style.width = `${(100 * place.filled) / Math.max(place.slots, 1)}%`;
}

// The table of a sequence that is swapped out: its blocks lie in CPU memory.
function drawCpuTable(card, request) {
  const strip = html(card, "div", { class: "strip", "aria-label": `Blocks of ${request.request_id} in CPU memory` });
  html(strip, "span", { class: "muted" }, "CPU");
  for (const id of request.cpu_block_ids) html(html(strip, "span", { class: "piece cpu", "data-block": `c${id}`, title: `block ${id} of the swap space` }), "b", {}, String(id));
}
