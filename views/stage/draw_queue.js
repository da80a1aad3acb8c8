// The free queue as the doubly linked list that it is, head on the left. Below it: what has just left or joined, and where from or to.
const QUEUE_TOP = 6;
const QUEUE_LOWER = 56;
const QUEUE_LEFT = 46;
const NODE_HEIGHT = 32;
const STORY_ROOM = 340; // pixels for the words beside what left the queue

class QueuePanel {
  constructor(parent) {
    this.body = parent;
    this.picture = svg(parent, "svg", { class: "picture", role: "img", height: 92 });
    this.head = svg(this.picture, "text", { x: 0, y: 27, class: "label" }, "head");
    this.tail = svg(this.picture, "text", { y: 27, class: "label" }, "tail");
    this.empty = svg(this.picture, "text", { x: QUEUE_LEFT, y: 27, class: "muted" }, "empty: no block is free");
    this.links = svg(this.picture, "g", { class: "links" });
    this.more = svg(this.picture, "text", { y: 27, class: "muted", "text-anchor": "middle" });
    this.nodes = new Map();
    this.arrow = svg(this.picture, "path", { class: "now-arrow" });
    this.story = svg(this.picture, "text", { y: QUEUE_LOWER + 21, class: "story" });
  }

  node(id) {
    let node = this.nodes.get(id);
    if (!node) {
      const group = svg(this.picture, "g", { class: "node", "data-block": id });
      node = { group, box: svg(group, "rect", { height: NODE_HEIGHT, rx: 8 }), text: svg(group, "text", { y: 21, "text-anchor": "middle" }) };
      node.name = svg(node.text, "tspan", {}, String(id));
      node.hash = svg(node.text, "tspan", { class: "hash" }, "");
      this.nodes.set(id, node);
    }
    return node;
  }

  draw(recording, frame) {
    if (this.traceId !== recording.traceId) {
      this.traceId = recording.traceId;
      this.nodes.forEach((node) => node.group.remove());
      this.nodes.clear();
    }
    const width = sizeOf(this.body).width - 1;
    setAttributes(this.picture, { width });
    const room = width - QUEUE_LEFT - 34;
    const queue = frame.queue;
    const widest = measure(`${frame.blocks.length - 1}#`, `700 12.5px ${fontFamily}`) + 6;
    const least = Math.max(26, Math.ceil(widest));
    const fits = Math.max(Math.floor(room / (least + 16)), 3);
    const tailShown = queue.length > fits ? 3 : 0;
    const headShown = queue.length > fits ? Math.max(fits - 4, 1) : queue.length;
    const places = Math.min(queue.length, fits);
    const pitch = Math.min(84, room / Math.max(places, 1));
    const nodeWidth = Math.max(Math.min(56, pitch - 22), least);
    const place = new Map();
    queue.forEach((id, i) => {
      if (i < headShown) place.set(id, i);
      else if (i >= queue.length - tailShown) place.set(id, headShown + 1 + i - (queue.length - tailShown));
    });
    const joined = new Set(frame.now.joined_queue);
    const left = frame.now.left_queue;
    const x = (i) => QUEUE_LEFT + i * pitch;
    const shown = Math.min(left.length, Math.max(Math.floor((width - QUEUE_LEFT - STORY_ROOM) / (nodeWidth + 8)), 1), 6); // the others are counted in words
    for (let id = 0; id < frame.blocks.length; id += 1) {
      const known = this.nodes.has(id);
      const at = place.get(id);
      const leaving = left.indexOf(id);
      if (!known && at === undefined && leaving < 0) continue;
      const node = this.node(id);
      const block = frame.blocks[id];
      const lowered = leaving >= 0 && leaving < shown;
      setAttributes(node.box, { width: nodeWidth });
      setAttributes(node.text, { x: nodeWidth / 2, style: nodeWidth < 40 ? "font-size:12.5px" : null });
      node.hash.textContent = block.block_hashes.length ? "#" : "";
      node.group.classList.toggle("now", joined.has(id) || leaving >= 0);
      node.group.classList.toggle("gone", at === undefined && !lowered);
      if (at !== undefined) this.move(node, x(at), QUEUE_TOP);
      else if (lowered) this.move(node, QUEUE_LEFT + leaving * (nodeWidth + 8), QUEUE_LOWER);
      else if (queue.includes(id)) this.move(node, x(headShown), QUEUE_TOP);
      else this.move(node, node.x || QUEUE_LEFT, QUEUE_LOWER + 8);
    }
    this.drawLinks(x, places, nodeWidth, pitch, tailShown ? headShown : -1, queue.length - headShown - tailShown);
    this.tail.style.display = queue.length ? "" : "none";
    setAttributes(this.tail, { x: QUEUE_LEFT + (places - 1) * pitch + nodeWidth + 8 });
    this.empty.style.display = queue.length ? "none" : "";
    this.drawStory(recording, frame, left, shown, nodeWidth, width);
    setAttributes(this.picture, { "aria-label": `Free queue from head to tail: ${queue.slice(0, 40).join(", ") || "empty"}.` });
  }

  move(node, x, y) {
    node.x = x;
    node.group.style.transform = `translate(${x}px, ${y}px)`;
  }

  // Both links between neighbours; where nodes are left out, a count instead.
  drawLinks(x, places, nodeWidth, pitch, hiddenAt, hidden) {
    let path = "";
    for (let i = 0; i < places - 1; i += 1) {
      if (i === hiddenAt || i + 1 === hiddenAt) continue;
      const from = x(i) + nodeWidth + 3;
      const to = x(i + 1) - 3;
      path += `M${from} ${QUEUE_TOP + 12}H${to}m-4 -4l4 4l-4 4M${to} ${QUEUE_TOP + 21}H${from}m4 -4l-4 4l4 4`;
    }
    if (!this.path) this.path = svg(this.links, "path", {});
    setAttributes(this.path, { d: path });
    this.more.textContent = hiddenAt >= 0 ? `… ${hidden} …` : "";
    setAttributes(this.more, { x: x(Math.max(hiddenAt, 0)) + nodeWidth / 2 });
  }

  drawStory(recording, frame, left, shown, nodeWidth, width) {
    const start = shown ? QUEUE_LEFT + shown * (nodeWidth + 8) + 4 : QUEUE_LEFT;
    const hidden = left.length > shown ? `and ${left.length - shown} more: ` : "";
    const text = frame.now.queue_text ? hidden + frame.now.queue_text : "";
    this.story.textContent = fitText(text, width - start, 13, 500);
    hint(this.story, text);
    setAttributes(this.story, { x: start });
    const fromHead = ["blocks_allocated", "blocks_swapped_in"].includes(frame.kind) || (recording.isPaper && frame.kind === "copy_queued");
    setAttributes(this.arrow, { d: shown && fromHead ? `M16 36C8 60 18 ${QUEUE_LOWER + 16} ${QUEUE_LEFT - 4} ${QUEUE_LOWER + 16}` : "" });
  }
}
