// Figure 5: where the attention of a query goes. The blocks stand in physical order, an arrow from the query leads to each, as thick as its share.
const SHARES_QUERY = 154;
const SHARES_ROW = 42;
const SHARES_BARS = 22; // height of a head's bar that gives a block everything

class SharesPanel {
  constructor(parent) {
    this.body = parent;
    this.picture = svg(parent, "svg", { class: "picture", role: "img" });
    this.signature = "";
    this.head = null; // whose shares are written in the blocks; null: the mean
  }

  // The newest shares at or before the cursor.
  newest(recording, index) {
    let at = index;
    while (at >= 0 && !recording.frames[at].shares) at -= 1;
    return at < 0 ? null : recording.frames[at];
  }

  draw(recording, index) {
    this.last = [recording, index];
    const { width, height } = sizeOf(this.body);
    const found = this.newest(recording, index);
    const signature = found ? `${recording.traceId}/${found.seq}/${found.seq === index}/${width}/${height}/${this.head}` : `${recording.traceId}/none/${width}`;
    if (signature === this.signature) return;
    this.signature = signature;
    this.picture.replaceChildren();
    const requests = found ? found.shares.requests : [];
    const row = requests.length > 1 ? SHARES_ROW : height - 4;
    setAttributes(this.picture, { width: width - 2, height: Math.max(requests.length * row, height - 4) });
    const label = requests.map((r) => `${recording.token(r.token)}: ${this.places(r).map(([logical, physical, share]) => `${percentText(share)} to logical block ${logical}, block ${physical}`).join("; ")}`).join(". ");
    setAttributes(this.picture, { "aria-label": label ? `${this.headWords()}. ${label}` : "No attention has been computed yet." });
    if (!found) svg(this.picture, "text", { x: 4, y: height / 2 + 4, class: "muted" }, "no attention has been computed yet");
    requests.forEach((request, i) => this.drawRequest(recording, found, request, i * row, row, width - 4, found.seq === index));
  }

  // The mean over the heads, or the head that was chosen.
  headWords() {
    return this.head === null ? "mean of the heads" : `head ${this.head}`;
  }

  // [logical, physical, share, share of each head] of the blocks, for the head that was chosen or the mean.
  places(request) {
    const head = this.head !== null && request.heads[this.head];
    return request.places.map(([logical, physical, share], i) => [logical, physical, head ? head[i] : share, request.heads.map((shares) => shares[i])]);
  }

  choose(head) {
    this.head = head === this.head ? null : head;
    this.draw(...this.last);
  }

  drawRequest(recording, frame, request, top, height, width, fresh) {
    const places = this.places(request).sort((a, b) => a[1] - b[1]); // physical order: neighbours in the text need not be neighbours in memory
    const left = SHARES_QUERY + 64;
    const gap = 8;
    const box = Math.min((width - left - gap * (places.length - 1)) / Math.max(places.length, 1), 250);
    const chooser = request.heads.length > 1;
    const tall = chooser ? Math.min(28, height - 21) : 28;
    const middle = chooser ? top + 1 + tall / 2 : top + height / 2;
    const colour = `--owner:${requestColour(recording, request.request)}`;
    const query = svg(this.picture, "g", { class: `share-query${fresh ? " now" : ""}`, style: colour });
    svg(query, "rect", { x: 2, y: middle - tall / 2, width: SHARES_QUERY - 4, height: tall, rx: 8 });
    svg(query, "text", { x: SHARES_QUERY / 2, y: middle + 4.5, "text-anchor": "middle" }, fitText(recording.token(request.token), SHARES_QUERY - 14, 13, 650));
    hint(query, `the query: token ${request.position} of ${request.request}, “${recording.token(request.token)}”${frame.shares.layer === null || frame.shares.layer === undefined ? "" : `, layer ${frame.shares.layer}, ${this.headWords()}`}`);
    if (chooser) this.drawHeads(request.heads.length, middle + tall / 2 + 4, colour);
    const links = svg(this.picture, "g", { class: "share-links", style: colour });
    places.forEach(([logical, physical, share, heads], i) => {
      const x = left + i * (box + gap);
      const lane = top + 3 + (i % 3) * 4;
      svg(links, "path", { d: `M${SHARES_QUERY} ${middle}C${SHARES_QUERY + 24} ${middle} ${SHARES_QUERY + 24} ${lane} ${SHARES_QUERY + 48} ${lane}H${x + box / 2 - 6}Q${x + box / 2} ${lane} ${x + box / 2} ${top + 17}`, "stroke-width": (0.8 + 4 * share).toFixed(2) });
      this.drawBlock(recording, frame, { logical, physical, share, heads, x, y: top + 18, width: box, height: height - 20, colour });
    });
    const end = left + places.length * (box + gap) + 8;
    if (chooser && height > 60) this.drawLegend(end, width - end, top + 18 + (height - 20) / 2);
  }

  // What the figures and the bars are, where there is room beside the blocks.
  drawLegend(x, room, middle) {
    const lines = [`in figures: ${this.headWords()}`, "bars: one for each head"];
    if (room < Math.max(...lines.map((line) => measure(line, `500 12.5px ${fontFamily}`)))) return;
    lines.forEach((line, i) => svg(this.picture, "text", { x, y: middle - 4 + i * 17, class: "label told" }, line));
  }

  // A small square for the mean and for each head; a click chooses whose shares are written in the blocks.
  drawHeads(number, y, colour) {
    const first = 28;
    const size = Math.min((SHARES_QUERY - 2 - first) / number, 15);
    for (let i = -1; i < number; i += 1) {
      const head = i < 0 ? null : i;
      const words = head === null ? "the mean of all heads" : `head ${head}`;
      const square = svg(this.picture, "g", { class: `share-head${this.head === head ? " on" : ""}`, style: colour, role: "button", tabindex: 0, "aria-label": words, "aria-pressed": String(this.head === head), "data-head": head ?? "mean" });
      const [x, width] = head === null ? [2, first - 2] : [2 + first + i * size, size - 1.5];
      svg(square, "rect", { x, y, width, height: 15, rx: 3 });
      svg(square, "text", { x: x + width / 2, y: y + 11.8, "text-anchor": "middle", class: size < 11 && head !== null ? "tight" : null }, head === null ? "all" : String(head));
      hint(square, `show ${words}`);
      square.addEventListener("click", () => this.choose(head));
      square.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") this.choose(head);
      });
    }
  }

  drawBlock(recording, frame, { logical, physical, share, heads, x, y, width, height, colour }) {
    const block = frame.blocks[physical];
    const words = block.token_ids.map((_, offset) => recording.slot(frame, block, offset).text).filter(Boolean).join(" ");
    const group = svg(this.picture, "g", { class: "share-block", "data-block": physical, tabindex: 0, style: colour });
    svg(group, "rect", { x, y, width, height, rx: 7, class: "box" });
    svg(group, "rect", { x, y, width: width * share, height, rx: 7, class: "part" });
    const percent = percentText(share);
    const room = width - 14 - measure(percent, `700 13px ${fontFamily}`);
    const tall = height > 40;
    const bars = tall && heads.length > 1 && width > 100 ? heads.length * Math.min(6, 60 / heads.length) : 0;
    const name = room > 130 ? `block ${physical} · logical ${logical}` : `block ${physical}`;
    svg(group, "text", { x: x + 7, y: y + 15, class: "name" }, tall ? fitText(name, room, 12, 650) : fitText(`${physical}: ${words}`, room - 4, 12, 500));
    if (tall) svg(group, "text", { x: x + 7, y: y + height - 8, class: "words" }, fitText(words, width - 18 - bars, 12, 500));
    svg(group, "text", { x: x + width - 6, y: y + 15, class: "percent", "text-anchor": "end" }, percent);
    const each = heads.map((value, head) => `head ${head}: ${percentText(value)}`).join(", ");
    hint(group, `block ${physical}, logical block ${logical}: ${percent} of the attention (${this.headWords()})\n${words}${each ? `\n${each}` : ""}`);
    if (bars) this.drawBars(group, heads, x + width - 7 - bars, y + height - 5, bars / heads.length);
  }

  // One bar for each head, as high as its share of the block.
  drawBars(group, heads, x, bottom, pitch) {
    heads.forEach((share, head) => {
      const tall = Math.max(share * SHARES_BARS, 0.8);
      svg(group, "rect", { x: x + head * pitch, y: bottom - tall, width: pitch - 1, height: tall, class: `head-bar${this.head === head ? " on" : ""}`, "data-head": head, "data-share": share.toFixed(4) });
    });
  }
}

function percentText(share) {
  const value = 100 * share;
  return value > 0 && value < 0.1 ? "under 0.1 %" : `${value.toFixed(1)} %`;
}
