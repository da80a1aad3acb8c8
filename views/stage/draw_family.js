// Who came from whom: per sequence group a lane for each sequence, or for a beam search a lane for each rank, and a column for every output.
const FAMILY_NODE = 78;
const FAMILY_GAP = 18;
const FAMILY_ROOT = 76;
const FAMILY_LANES = { most: 22, least: 13 };

class FamilyPanel {
  constructor(parent) {
    this.body = parent;
    this.picture = svg(parent, "svg", { class: "picture", role: "img" });
    this.signature = "";
  }

  draw(recording, frame, index) {
    const { width, height } = sizeOf(this.body);
    const parts = [recording.traceId, recording.choiceBefore(index), width, height, frame.kind === "sequence_forked" ? frame : null, ...frame.requests];
    if (this.parts && parts.length === this.parts.length && parts.every((part, i) => part === this.parts[i])) return;
    this.parts = parts;
    const families = this.families(recording, frame, index);
    const signature = JSON.stringify([recording.traceId, families, width, height, frame.kind === "sequence_forked" ? frame.request : ""]);
    if (signature === this.signature) return;
    this.signature = signature;
    this.picture.replaceChildren();
    const count = families.reduce((sum, f) => sum + f.lanes, 0);
    this.lane = Math.min(Math.max((height - 4) / Math.max(count, 1), FAMILY_LANES.least), FAMILY_LANES.most);
    const columns = Math.max(0, ...families.map((f) => f.columns));
    setAttributes(this.picture, { width: Math.max(FAMILY_ROOT + columns * (FAMILY_NODE + FAMILY_GAP) + 4, width - 2), height: Math.max(count * this.lane + 2, height - 3) });
    setAttributes(this.picture, { "aria-label": families.map((f) => f.words).join(" ") || "No sequence yet." });
    if (!families.length) svg(this.picture, "text", { x: 4, y: height / 2 + 4, class: "muted" }, "no sequence yet");
    let top = Math.max((height - 3 - count * this.lane) / 2, 1);
    for (const family of families) {
      this.drawFamily(recording, frame, family, top);
      top += family.lanes * this.lane;
    }
    this.body.scrollLeft = this.body.scrollWidth;
  }

  // Each group as {name, lanes, columns, nodes}; a node is {lane, column, text, sequence, from: node index or -1, alive, forced, ended}.
  families(recording, frame, index) {
    const byGroup = new Map();
    for (const request of frame.requests) {
      const name = recording.groupName(request);
      if (!byGroup.has(name)) byGroup.set(name, []);
      byGroup.get(name).push(request);
    }
    const made = [];
    for (const [name, members] of byGroup) {
      const choices = recording.choicesUpTo(index).filter((f) => f.beams.group === name || members.some((r) => r.request_id === f.beams.group));
      if (recording.header.prefixes.includes(name)) continue;
      const family = choices.length ? trellis(recording, choices, members) : lanesOfSamples(recording, members);
      const prefix = recording.prefixOf(members[0]);
      made.push({ name, prefix, ...family });
    }
    return made;
  }

  drawFamily(recording, frame, family, top) {
    const middle = (lane) => top + (lane + 0.5) * this.lane;
    const x = (column) => FAMILY_ROOT + FAMILY_GAP + column * (FAMILY_NODE + FAMILY_GAP);
    const size = Math.min(12, this.lane - 3);
    const height = Math.min(this.lane - 2, 20);
    const rootY = top + (family.lanes * this.lane) / 2;
    const root = svg(this.picture, "g", { class: "family-root" });
    svg(root, "rect", { x: 1, y: rootY - height / 2, width: FAMILY_ROOT - 2, height, rx: 6 });
    svg(root, "text", { x: FAMILY_ROOT / 2, y: rootY + size * 0.36, "text-anchor": "middle", style: `font-size:${size}px` }, fitText(family.prefix ? `${isPlainPrefix(family.prefix) ? "prefix" : family.prefix} + ${family.name}` : family.name, FAMILY_ROOT - 6, size, 600));
    hint(root, family.prefix ? `${family.name} begins with the provider's prefix ${family.prefix}` : `the prompt of ${family.name}`);
    for (const node of family.nodes) {
      const left = x(node.column);
      const from = node.from < 0 ? { x: FAMILY_ROOT, y: rootY } : { x: x(family.nodes[node.from].column) + FAMILY_NODE, y: middle(family.nodes[node.from].lane) };
      const y = middle(node.lane);
      svg(this.picture, "path", { d: `M${from.x} ${from.y}C${from.x + 9} ${from.y} ${left - 9} ${y} ${left} ${y}`, class: `family-link${node.alive ? "" : " lost"}`, style: `--owner:${requestColour(recording, node.sequence)}` });
      const group = svg(this.picture, "g", { class: `family-node${node.alive ? "" : " lost"}${node.ended ? " ended" : ""}${node.forced ? " forced" : ""}${frame.kind === "sequence_forked" && frame.request === node.sequence && node.last ? " now" : ""}`, style: `--owner:${requestColour(recording, node.sequence)}` });
      svg(group, "rect", { x: left, y: y - height / 2, width: FAMILY_NODE, height, rx: 5 });
      svg(group, "text", { x: left + FAMILY_NODE / 2, y: y + size * 0.36, "text-anchor": "middle", style: `font-size:${size}px` }, fitText(node.text, FAMILY_NODE - 6, size, 600));
      hint(group, [`${node.sequence}: ${node.text}`, node.logprob ? `log-probability so far ${node.logprob}` : "", node.alive ? "" : "dropped later", node.forced ? "dictated by the scenario" : ""].filter(Boolean).join("\n"));
    }
  }
}

// Samples: a lane for each sequence, in order of birth.
function lanesOfSamples(recording, members) {
  const nodes = [];
  let columns = 1;
  members.forEach((request, lane) => {
    const alive = !isDropped(request);
    const outputs = request.token_ids.slice(request.num_prompt_tokens);
    if (members.length > 1) nodes.push({ lane, column: 0, text: request.request_id, sequence: request.request_id, from: -1, alive, last: true });
    const first = members.length > 1 ? 1 : 0;
    outputs.forEach((token, i) => {
      const from = i || first ? nodes.length - 1 : -1;
      nodes.push({ lane, column: i + first, text: recording.token(token), sequence: request.request_id, from, alive, forced: request.forced.includes(request.num_prompt_tokens + i), ended: request.status.startsWith("FINISHED") && i === outputs.length - 1 });
    });
    columns = Math.max(columns, outputs.length + first);
  });
  return { nodes, columns, lanes: Math.max(members.length, 1), words: `${members.length === 1 ? "one sequence" : `${members.length} sequences`}.` };
}

// Beams: a column for each selection, the survivors in order of rank; what has no living descendant is grey.
function trellis(recording, choices, members) {
  const nodes = [];
  let before = new Map();
  let lanes = 1;
  choices.forEach(({ beams }, column) => {
    const here = new Map();
    let lane = 0;
    for (const candidate of beams.candidates) {
      if (candidate.sequence === null) continue;
      const from = before.has(candidate.parent) ? before.get(candidate.parent) : -1;
      here.set(candidate.sequence, nodes.length);
      nodes.push({ lane, column, text: recording.token(candidate.token), sequence: candidate.sequence, from, alive: false, forced: candidate.forced, ended: candidate.finished, logprob: logprobText(candidate.logprob), last: column === choices.length - 1 });
      lane += 1;
    }
    lanes = Math.max(lanes, lane);
    before = here;
  });
  const results = members.filter((r) => r.status.startsWith("FINISHED") && !isDropped(r)).map((r) => r.request_id);
  nodes.forEach((node, at) => {
    const living = node.last || (results.includes(node.sequence) && !nodes.slice(at + 1).some((later) => later.sequence === node.sequence));
    for (let i = at; living && i >= 0 && !nodes[i].alive; i = nodes[i].from) nodes[i].alive = true;
  });
  return { nodes, columns: choices.length, lanes, words: `Beam search after ${plural(choices.length, "selection")}.` };
}
