// The swap space: blocks in CPU memory and their free queue. At a swap, cells fly between it and the pool.
const FLIGHT_MILLISECONDS = 550;

class SwapPanel {
  constructor(parent, title) {
    this.body = parent;
    this.count = html(title, "span");
    this.free = html(title, "span");
    this.picture = svg(parent, "svg", { class: "picture", role: "img" });
    this.cells = [];
    this.layoutKey = "";
  }

  layout(recording, frame) {
    const { width, height } = sizeOf(this.body);
    const count = frame.cpu_blocks.length;
    const key = `${recording.traceId}/${count}/${width}/${height}`;
    if (key === this.layoutKey) return;
    this.layoutKey = key;
    this.picture.replaceChildren();
    const gap = 5;
    const inOneLine = Math.floor((width - 2 + gap) / (64 + gap));
    const form = count <= inOneLine ? "line" : "squares";
    const columns = Math.max(form === "line" ? count : Math.min(Math.ceil(count / 2), Math.floor((width - 2 + gap) / (46 + gap))), 1);
    const rows = Math.ceil(count / columns);
    const most = (height - 3 - gap * (rows - 1)) / rows;
    const shape = { ...FORMS[form], form, columns, rows, gap, width: Math.min((width - 2 - gap * (columns - 1)) / columns, 130), height: form === "line" ? Math.min(most, 66) : Math.max(Math.min(most, 44), 31) };
    setAttributes(this.picture, { width: width - 2, height: Math.max(rows * (shape.height + gap) - gap + 3, height - 3) });
    this.cells = Array.from({ length: count }, (_, id) => new Cell(this.picture, id, 1 + (id % columns) * (shape.width + gap), 1.5 + Math.floor(id / columns) * (shape.height + gap), shape, false, `c${id}`));
  }

  draw(recording, frame) {
    this.layout(recording, frame);
    const now = new Set((frame.now.swapped || []).map(([, cpu]) => cpu));
    frame.cpu_blocks.forEach((block, id) => {
      this.cells[id].group.classList.toggle("now", now.has(id));
      this.cells[id].draw(recording, frame, block, null);
    });
    const used = frame.cpu_blocks.filter((b) => b.ref_cnt > 0).length;
    const queue = frame.cpu_queue;
    setText(this.count, `${used} of ${frame.cpu_blocks.length} used`);
    setText(this.free, `free: ${queue.slice(0, 5).join(", ") || "none"}${queue.length > 5 ? ", …" : ""}`);
    this.free.title = `free queue of the swap space, head first: ${queue.join(", ") || "empty"}`;
    setAttributes(this.picture, { "aria-label": `Swap space in CPU memory: ${used} blocks in use, ${queue.length} free.` });
  }

  // Each block that has just been copied between GPU and CPU memory flies from where it was to where it is. Only when stepping forward, and never for those
  // who want no motion: for them the rings and the sentence say it.
  fly(root, pool, frame) {
    if (!frame.now.swapped || matchMedia("(prefers-reduced-motion: reduce)").matches || !root.animate) return;
    const zoom = root.offsetWidth ? root.getBoundingClientRect().width / root.offsetWidth : 1;
    const base = root.getBoundingClientRect();
    for (const [gpu, cpu] of frame.now.swapped) {
      const cells = [pool.cells[gpu], this.cells[cpu]];
      if (!cells[0] || !cells[1]) continue;
      const [from, to] = (frame.now.swap === "out" ? cells : cells.reverse()).map((cell) => cell.group.getBoundingClientRect());
      const flier = html(root, "div", { class: "flier", "aria-hidden": "true" }, frame.now.swap === "out" ? `${gpu} → CPU ${cpu}` : `CPU ${cpu} → ${gpu}`);
      Object.assign(flier.style, { left: `${(from.left - base.left) / zoom}px`, top: `${(from.top - base.top) / zoom}px`, width: `${from.width / zoom}px`, height: `${from.height / zoom}px` });
      const move = `translate(${(to.left - from.left) / zoom}px, ${(to.top - from.top) / zoom}px) scale(${to.width / from.width}, ${to.height / from.height})`;
      const flight = flier.animate([{ transform: "none", opacity: 0.95 }, { transform: move, opacity: 0.8 }], { duration: FLIGHT_MILLISECONDS, easing: "ease-in-out" });
      flight.onfinish = flight.oncancel = () => flier.remove();
    }
  }
}
