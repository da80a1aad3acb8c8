// The prefix cache as what it is, chains of hashes: every node is one hash with its blocks in each group, its parent the hash of what comes before.
const CHAIN_NARROW = 180;
const CHAIN_WIDE = 330;
const CHAIN_WIDER = 90; // for every further group
const CHAIN_GAP = 30;
const CHAIN_WORDS_LEAST = 30; // with less room, words are left to the hint
const CHAIN_ROOT = 52;
const CHAIN_MOST = 120; // nodes drawn at most

class ChainsPanel {
  constructor(parent) {
    this.body = parent;
    this.picture = svg(parent, "svg", { class: "picture", role: "img" });
    this.signature = "";
  }

  draw(recording, frame, index) {
    this.recording = recording;
    const caching = frame.kind === "block_cached" || frame.kind === "block_evicted" ? frame : null;
    const parts = [recording.traceId, recording.frames[frame.cacheSince], caching, sizeOf(this.body).width, ...frame.requests.flatMap((r) => [r.block_hashes, r.status])];
    if (this.parts && parts.length === this.parts.length && parts.every((part, i) => part === this.parts[i])) return;
    this.parts = parts;
    const nodes = chainNodes(recording, frame, recording.cacheAt(index));
    const hidden = nodes.length - CHAIN_MOST;
    if (hidden > 0) nodes.length = CHAIN_MOST;
    for (const node of nodes) node.words = this.words(recording, frame, node);
    const now = frame.kind === "block_cached" || frame.kind === "block_evicted" ? frame.now.blocks : [];
    const signature = JSON.stringify([recording.traceId, nodes, now, hidden, sizeOf(this.body).width]);
    if (signature === this.signature) return;
    this.signature = signature;
    this.picture.replaceChildren();
    setAttributes(this.picture, { "aria-label": `Prefix cache: ${nodes.length} ${nodes.length === 1 ? "hash" : "hashes"}${hidden > 0 ? ` and ${hidden} more that are not drawn` : ""}.` });
    const lanes = this.place(nodes);
    const lane = [0, 40, 31, 21][lanes] || 23;
    this.twoLines = lanes === 1 && recording.hasGroups; // where several groups share a hash, their names and blocks take a line of their own
    const height = this.twoLines ? 44 : [0, 32, 26, 19][lanes] || 20;
    const widest = Math.max(0, ...nodes.map((n) => n.depth + 1));
    this.width = this.nodeWidth(nodes, widest);
    const top = lanes > 1 ? 2 : Math.max((sizeOf(this.body).height - height) / 2 - 1, 2);
    const y = (n) => top + n.lane * lane;
    setAttributes(this.picture, { width: Math.max(CHAIN_ROOT + widest * (this.width + CHAIN_GAP) + 8, sizeOf(this.body).width - 2), height: Math.max(lanes * lane + 2, sizeOf(this.body).height - 4) });
    svg(this.picture, "rect", { x: 1, y: top, width: CHAIN_ROOT - 2, height, rx: 8, class: "chain-root" });
    svg(this.picture, "text", { x: CHAIN_ROOT / 2, y: top + height / 2 + 4.5, "text-anchor": "middle", class: "muted" }, "root");
    if (!nodes.length) svg(this.picture, "text", { x: CHAIN_ROOT + 16, y: top + height / 2 + 4.5, class: "muted" }, recording.header.caching ? "nothing is hashed yet" : "prefix caching is off");
    const x = (depth) => CHAIN_ROOT + CHAIN_GAP + depth * (this.width + CHAIN_GAP);
    for (const node of nodes) {
      const left = x(node.depth);
      const from = node.depth ? x(node.depth - 1) + this.width : CHAIN_ROOT;
      const middle = y(node) + height / 2;
      const start = (node.above ? y(node.above) : top) + height / 2;
      const bend = from + 12;
      const path = start === middle ? `M${from} ${middle}H${left - 2}` : `M${from} ${start}H${bend}V${middle}H${left - 2}`;
      svg(this.picture, "path", { d: `${path}m-6 -5l6 5l-6 5`, class: node.lost ? "chain-link lost" : "chain-link" });
      this.drawNode(node, left, y(node), height, now);
    }
    const news = nodes.filter((n) => n.blocks.some((b) => now.includes(b)));
    if (news.length) this.body.scrollLeft = Math.max(0, x(Math.max(...news.map((n) => n.depth))) + this.width + 10 - sizeOf(this.body).width); // a chain longer than the panel
  }

  drawNode(node, x, y, height, now) {
    const isNow = node.blocks.some((b) => now.includes(b));
    const group = svg(this.picture, "g", { class: `chain-node${isNow ? " now" : ""}`, transform: `translate(${x},${y})`, "data-block": node.blocks[0], "data-blocks": node.blocks.join(" "), tabindex: 0 });
    svg(group, "rect", { width: this.width, height, rx: Math.min(8, height / 3) });
    const line = this.twoLines ? 17.5 : height / 2 + 4.5;
    svg(group, "text", { x: 10, y: line, class: "hash" }, node.hash.slice(0, 6));
    const where = this.where(node);
    const right = (this.twoLines ? 0 : measure(where, `600 12.5px ${fontFamily}`)) + 10;
    const left = 16 + measure(node.hash.slice(0, 6), `700 13px ${fontFamily}`);
    const room = this.width - left - 6 - right;
    svg(group, "text", { x: left, y: line, class: "words" }, room < CHAIN_WORDS_LEAST ? "" : fitText(node.words, room, 12.5, 500));
    svg(group, "text", this.twoLines ? { x: 10, y: line + 17, class: "where" } : { x: this.width - 10, y: line, "text-anchor": "end", class: "where" }, where);
    const parent = node.parent ? `${node.lost ? "after" : "parent"} ${node.parent.slice(0, 6)}…${node.lost ? " (what is between is not cached)" : ""}` : node.known ? "first block: no parent" : "its request is gone";
    hint(group, `${node.hash}\n${node.words}\n${where}; ${parent}`);
  }

  // “block 7”, or with several groups “full 1 · window 8: 5, 9”.
  where(node) {
    const list = (ids) => `block${ids.length > 1 ? "s" : ""} ${ids.join(", ")}`;
    if (!this.recording.hasGroups) return list(node.blocks);
    return node.groups.map(([group, ids]) => `${this.recording.groups[group].label}: ${ids.join(", ")}`).join(" · ");
  }

  // One width for all nodes, wide enough for the longest words if that is reasonable; of a chain that would not fit the panel, words are cut before blocks are.
  nodeWidth(nodes, widest) {
    const where = nodes.map((n) => measure(this.where(n), `600 12.5px ${fontFamily}`));
    const words = nodes.map((n) => 74 + measure(n.words, `500 12.5px ${fontFamily}`) + 10);
    const wanted = nodes.map((_, i) => (this.twoLines ? Math.max(words[i], where[i] + 22) : words[i] + 18 + where[i]));
    const least = Math.max(CHAIN_NARROW, ...where.map((w) => (this.twoLines ? w + 22 : w + 92)));
    const room = (sizeOf(this.body).width - CHAIN_ROOT - 10) / Math.max(widest, 1) - CHAIN_GAP;
    const width = Math.min(Math.max(CHAIN_NARROW, ...wanted), CHAIN_WIDE + (this.recording.groups.length - 1) * CHAIN_WIDER);
    return width > room ? Math.floor(Math.max(room, least)) : Math.ceil(width);
  }

  // The tokens that it adds to its parent's: those of the request that knows the chain, else those in the block's slots.
  words(recording, frame, node) {
    const request = node.tokens && recording.request(frame, node.tokens.request);
    if (request) return request.token_ids.slice(node.tokens.from, node.tokens.to).map((t) => recording.token(t)).join(" ");
    const block = frame.blocks[node.blocks[0]];
    return block.token_ids.map((_, i) => recording.slot(frame, block, i).text).filter(Boolean).join(" ");
  }

  // Depth and lane of every node: a first child stays in its parent's lane, each further one opens a lane below. Returns the number of lanes.
  place(nodes) {
    const byHash = new Map(nodes.map((n) => [n.hash, n]));
    const children = new Map();
    for (const node of nodes) {
      node.above = node.parent ? byHash.get(node.parent) || null : null;
      const key = node.above ? node.above.hash : "";
      children.set(key, [...(children.get(key) || []), node]);
    }
    let lanes = 0;
    const walk = (node, depth, lane) => {
      node.depth = depth;
      node.lane = lane;
      (children.get(node.hash) || []).forEach((child, i) => walk(child, depth + 1, i === 0 ? lane : lanes++));
    };
    for (const root of children.get("") || []) walk(root, 0, lanes++);
    return Math.max(lanes, 1);
  }
}

// The hashes of the prefix cache, each once, those of requests that still run first. `groups`: [group, block ids] pairs; `parent`: the hash it hangs on;
// `lost`: what should come before it is not cached; `known`: a request still knows its chain; `tokens`: whose tokens it adds to its parent's, from where to where.
function chainNodes(recording, frame, cache) {
  const registered = new Map();
  for (const [key, ids] of cache) {
    const at = key.lastIndexOf(":");
    const digest = key.slice(0, at);
    if (!registered.has(digest)) registered.set(digest, new Map());
    registered.get(digest).set(Number(key.slice(at + 1)), ids);
  }
  const places = new Map();
  for (const request of frame.requests) {
    request.block_hashes.forEach((digest, i) => places.has(digest) || places.set(digest, { request, number: i + 1 }));
  }
  const nodes = [...registered].map(([hash, held]) => {
    const node = { hash, groups: [...held], blocks: [...held.values()].flat(), parent: null, lost: false, known: false, tokens: null, running: false };
    return places.has(hash) ? Object.assign(node, chainPlace(recording, held, registered, places.get(hash))) : node;
  });
  return nodes.length > CHAIN_MOST ? [...nodes.filter((n) => n.running), ...nodes.filter((n) => !n.running)] : nodes;
}

// Where a hash stands that covers `number` hash units of a request. A recurrent state stands for all tokens before it and needs no other hash; a block of
// keys and values hangs on the block before it in its group.
function chainPlace(recording, held, registered, { request, number }) {
  const unit = recording.header.hash_block_size;
  const chain = request.block_hashes;
  let before = number - 1;
  while (before > 0 && !registered.has(chain[before - 1])) before -= 1;
  const place = { known: true, running: !request.status.startsWith("FINISHED"), parent: before ? chain[before - 1] : null };
  const attention = [...held.keys()].filter((g) => !recording.groups[g].is_state);
  const starts = attention.map((g) => Math.floor(((number - 1) * unit) / recording.span(g)) * (recording.span(g) / unit));
  const from = attention.length ? Math.max(...starts) : before;
  place.tokens = { request: request.request_id, from: from * unit, to: number * unit };
  if (!attention.length) return place;
  const found = starts.findIndex((start, i) => start === 0 || (registered.get(chain[start - 1]) || new Map()).has(attention[i]));
  if (found < 0) return Object.assign(place, { lost: true, parent: place.parent || chain[starts[0] - 1] });
  return Object.assign(place, { parent: starts[found] ? chain[starts[found] - 1] : null });
}
