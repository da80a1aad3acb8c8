// A request with several KV-cache groups: its tokens downwards, beside them one lane per group, each block as high as the tokens that it stands for.
// And what all requests share: places of a table in words, what a lookup found, the worker's row.
const LANE_WORDS = 8; // up to so many tokens per line have a field each, more are running text
const FEW_LANES = 4; // beside more lanes there is no room for fields

function drawLanes(parent, { recording, request, tables, tokens, now, just }) {
  const spans = recording.groups.map((_, groupId) => recording.span(groupId));
  const unit = spans.reduce(greatestCommonDivisor);
  const count = Math.max(Math.ceil(tokens.length / unit), ...tables.map((places, g) => (places.length * spans[g]) / unit));
  const grid = html(parent, "div", { class: "lanes", role: "table", "aria-label": "Block tables" });
  grid.style.setProperty("--groups", spans.length);
  grid.style.setProperty("--lane", `${[56, 56, 56, 48, 42][spans.length] || 31}px`);
  grid.classList.toggle("many", spans.length > 2);
  html(grid, "span", { class: "lane-title" });
  html(grid, "span", { class: "lane-title" }, "tokens");
  recording.groups.forEach((group, groupId) => html(grid, "span", { class: "lane-title lane", role: "columnheader", title: `group ${groupId}: ${group.title}` }, spans.length > FEW_LANES ? shortLabel(group.label) : group.label));
  for (let line = 0; line < count; line += 1) {
    const number = html(grid, "span", { class: "lane-position", title: "position of the first token" }, String(line * unit));
    number.style.gridRow = String(line + 2);
    const words = html(grid, "span", { class: "lane-words" });
    words.style.gridArea = `${line + 2} / 2`;
    const part = tokens.slice(line * unit, (line + 1) * unit);
    if (unit > LANE_WORDS || spans.length > FEW_LANES) drawWords(words, part);
    else drawCells(words, part, unit, just ? request.token_ids.length - 1 : -1);
  }
  tables.forEach((places, groupId) => {
    for (const place of places) drawPlace(grid, place, groupId, spans[groupId] / unit, now.has(`${groupId}/${place.logical}`), spans.length <= FEW_LANES);
  });
}

// One place of a group's lane, over as many lines as its block has tokens.
function drawPlace(grid, place, groupId, lines, isNow, roomy) {
  const id = place.physical ?? place.ghost;
  const kind = id === null ? (place.stop ? "stopped" : "empty") : place.physical === null ? "ghost" : place.isNull ? "null" : "held";
  const element = html(grid, "span", { class: `place ${kind}${isNow ? " now" : ""}`, role: "cell", "data-block": id ?? (place.stop ? place.stop.block : null), "data-group": groupId, title: placeTitle(place) });
  element.style.gridArea = `${place.logical * lines + 2} / ${groupId + 3} / span ${lines}`;
  if (place.stop) return html(element, "b", {}, place.stop.block === null ? "✕" : String(place.stop.block));
  if (id === null) return null;
  const head = html(element, "b", {}, place.isNull ? (roomy ? "∅ null" : "∅") : String(id));
  if (kind !== "held") return element;
  if (place.hashed) html(head, "span", { class: "hash" }, place.partial ? ` #${place.partial.covered}/${place.partial.size}` : " #");
  if (!place.slots) html(element, "small", {}, place.state === null ? "no state" : lines > 1 ? `after ${place.state}` : `@${place.state}`);
  else {
    const bar = html(html(element, "span", { class: "bar-of-slots" }), "i", {});
    bar.style.width = `${(100 * place.filled) / place.slots}%`;
  }
  return element;
}

function placeTitle(place) {
  const logical = `logical block ${place.logical}`;
  if (place.stop) return `no hit: ${place.stop.words}${place.stop.block === null ? "" : `\nblock ${place.stop.block} has this content`}`;
  if (place.physical === null) return place.ghost === null ? `${logical}: no block yet` : `${logical}: ${place.isNull ? "would stay null" : `block ${place.ghost} would be adopted`}`;
  if (place.isNull) return `${logical}: the null block, nothing is kept here`;
  const holds = place.slots ? `${place.filled} of ${place.slots} slots filled` : stateText(place);
  return [`${logical} → block ${place.physical}`, holds, hashTitle(place)].filter(Boolean).join("\n");
}

// The tokens of one logical block: a field for each.
function drawCells(parent, tokens, span, justPosition = -1) {
  const cells = html(parent, "span", { class: "cells" });
  cells.style.setProperty("--columns", Math.min(span, 4));
  for (let i = 0; i < span; i += 1) {
    const cell = tokens[i];
    if (cell) html(cells, "span", { class: `${tokenClass(cell, cell.position === justPosition)}${Array.from(cell.text).length > 6 ? " long" : ""}`, title: tokenTitle(cell) }, cell.text);
    else html(cells, "span", { class: "token vacant" });
  }
}

// The same as running text, where a block has too many tokens for fields of their own.
function drawWords(parent, tokens) {
  const text = html(parent, "span", { class: "words-of-block", title: tokens.map((t) => t.text).join(" ") });
  for (const cell of tokens) html(text, "span", { class: tokenClass(cell, false).replace("token", "word") }, `${cell.text} `);
}

function tokenTitle(cell) {
  const kv = cell.elsewhere !== null ? `its key and value belong to rank ${cell.elsewhere}` : cell.written ? "key and value have been computed" : "key and value are not written yet";
  const origin = cell.forced ? "dictated by the scenario" : cell.generated ? "generated" : "prompt";
  return `token ${cell.position}: ${cell.text}\n${origin}; ${kv}`;
}

function tokenClass(cell, just) {
  const parts = { unwritten: !cell.written, generated: cell.generated, forced: cell.forced, elsewhere: cell.elsewhere !== null, just };
  return ["token", ...Object.keys(parts).filter((name) => parts[name])].join(" ");
}

// ---------------------------------------------------------------- places of a block table in words

function physicalClass(place) {
  const id = place.physical ?? place.ghost;
  if (place.stop) return `physical none stopped${place.stop.block === null ? "" : " cached"}`;
  return `physical${id === null || place.isNull ? " none" : place.physical === null ? " ghost" : ""}`;
}

function physicalText(place) {
  const id = place.physical ?? place.ghost;
  if (place.stop) return place.stop.block === null ? "✕" : String(place.stop.block);
  return id === null ? "–" : place.isNull ? "∅ null" : String(id);
}

function physicalTitle(place) {
  if (place.stop) return `no hit: ${place.stop.words}`;
  return place.physical === null && place.ghost !== null && !place.isNull ? "this cached block would be adopted" : place.physical !== null && place.isNull ? "the null block: nothing is kept here" : "physical block";
}

function placeNumber(place) {
  if (place.ghost !== null || place.isNull) return "";
  return place.slots ? `${place.filled}/${place.slots}` : place.state === null ? "" : `@${place.state}`;
}

function stateText(place) {
  return place.state === null ? "no state yet" : `state after ${plural(place.state, "token")}`;
}

function hashTitle(place) {
  if (!place.hashed) return null;
  if (place.partial) return `its hash covers ${place.partial.covered} of its ${place.partial.size} tokens`;
  return "full and hashed: another request may share it";
}

// ---------------------------------------------------------------- lookups and the worker

function drawLookup(parent, recording, lookup) {
  const box = html(parent, "div", { class: `lookup${lookup.groups.length > 2 ? " many" : ""}` });
  for (const found of lookup.groups) {
    const line = html(box, "p", { title: found.stop });
    if (recording.hasGroups) html(line, "b", {}, `${recording.groups[found.group].label}: `);
    html(line, "span", {}, recording.hasGroups ? String(found.tokens) : `${plural(found.tokens, "token")} found`);
    if (found.stop) html(line, "span", { class: "muted" }, `${recording.hasGroups ? " –" : ":"} ${found.stop}`);
  }
}

// The worker's row beside the manager's table: it is told of new blocks only, so it may keep ids that the manager has replaced by null (R8.3).
function drawWorkerRow(parent, recording, request, row, isNow) {
  const line = html(parent, "p", { class: `worker-row${isNow ? " now" : ""}`, title: "The block table on the worker. It is told of new blocks only: where the manager has null by now, it keeps the old block." });
  html(line, "span", { class: "muted" }, `worker row ${row.row} `);
  row.block_ids.forEach((ids, groupId) => {
    const part = html(line, "span", { class: `worker-ids${ids.length <= 12 ? " few" : ""}`, "data-group": groupId });
    if (recording.hasGroups) html(part, "span", { class: "muted" }, `${recording.groups[groupId].label} `);
    if (!ids.length) html(part, "span", { class: "muted" }, "–");
    ids.forEach((id, i) => {
      const same = (request.block_ids[groupId] || [])[i] === id;
      html(part, "span", { class: `worker-id${same ? "" : " stale"}`, title: same ? null : "the manager's table has something else here", "data-block": recording.isNull(id) ? null : id }, recording.isNull(id) ? "∅" : String(id));
    });
  });
}

// “w 8 (2)” for “window 8 (2)”: groups of one kind stay apart where there is little room; the legend says what w is.
function shortLabel(label) {
  return label.replace(/^window /, "w ");
}

function greatestCommonDivisor(a, b) {
  return b ? greatestCommonDivisor(b, a % b) : a;
}
