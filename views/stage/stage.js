// The stage: narration, transport and panels over one recording. `mountStage` needs nothing but an element and data, so it also runs in a saved page.
const LOOK_AHEAD = 200; // ask for more frames when fewer than this many lie ahead of the cursor
const LARGEST_ZOOM = 2;
const ADDRESS_DELAY = 150; // milliseconds; browsers limit how often the address may change

class Stage {
  // hooks.need(numFramesHeld): more frames are wanted. Absent in a saved page.
  constructor(root, hooks) {
    this.root = root;
    this.hooks = hooks || {};
    this.recording = new Recording();
    this.index = 0;
    this.wanted = stepOfAddress(); // a step that the address asks for and that may not be recorded yet
    this.asked = -1;
    this.pinned = null;
    this.build();
    this.onKey = (event) => this.key(event);
    this.onLeave = () => this.light(this.pinned);
    document.addEventListener("keydown", this.onKey);
    this.resize = new ResizeObserver(() => {
      forgetSizes();
      this.redrawSoon();
    });
    for (const element of [this.root, this.pool.body, this.queue.body, this.foot, this.transport.track]) this.resize.observe(element);
  }

  build() {
    const root = this.root;
    root.replaceChildren();
    root.classList.add("stage");
    const head = html(root, "header", { class: "head" });
    this.title = html(head, "h1");
    this.kernels = html(head, "a", { class: "chip kernels", target: "_self", title: "What the kernels of this step did, program by program (k)" }, "Kernels");
    this.chips = html(head, "div", { class: "chips" });
    const place = html(root, "div", { class: "say-place" }); // what has no room in it opens over the rest, under the mouse or the focus
    const say = html(place, "section", { class: "say", "aria-live": "polite", tabindex: 0 });
    const line = html(say, "div", { class: "first" });
    this.text = html(line, "b");
    this.symbol = html(line, "code");
    this.second = html(say, "div", { class: "second" });
    this.note = html(this.second, "span", { class: "note" });
    this.why = html(this.second, "span");
    this.transport = new Transport(root, { move: (d, size) => this.move(d, size), seek: (i) => this.seek(i) });
    const main = html(root, "div", { class: "panels" });
    const left = this.card(main, "Requests and block tables", "requests");
    this.requests = new RequestsPanel(left.body);
    this.rows = new WorkerRowsPanel(html(left.card, "div", { class: "rows-body" }));
    left.title.replaceChildren();
    this.requestsTitle = html(left.title, "span", { class: "title-words" });
    this.rowsButton = html(left.title, "button", { class: "rows-button", type: "button", title: "The worker's rows beside the manager's tables (w)" });
    this.rowsButton.addEventListener("click", () => this.toggleRows());
    this.legend = html(left.card, "p", { class: "legend" });
    this.rowsLink = html(left.card, "a", { class: "rows-link", target: "_self" }, "How the kernels of this step walk these rows →");
    const middle = this.card(main, "Physical blocks", "pool");
    this.pool = new PoolPanel(middle.body, middle.title);
    const queueTitle = html(middle.card, "h2", { class: "queue-title" }, "Free queue");
    this.queueWords = html(queueTitle, "span", {});
    this.queue = new QueuePanel(html(middle.card, "div", { class: "queue" }));
    const right = this.card(main, "What happened", "happened");
    this.where = html(right.title, "span");
    this.events = new EventsPanel(right.body, (i) => this.seek(i));
    this.slots = new SlotsPanel(html(right.card, "div", { class: "slots-part" }));
    this.correction = new CorrectionBox(right.card);
    this.foot = html(root, "div", { class: "foot" });
    this.chains = this.footPart("chains", "Prefix chains", ChainsPanel);
    this.family = this.footPart("family", "Who came from whom", FamilyPanel);
    this.shares = this.footPart("shares", "Attention", SharesPanel);
    this.swap = this.footPart("swap", "Swap space (CPU)", SwapPanel);
    for (const [type, target] of [["mouseover", null], ["focusin", null]]) {
      root.addEventListener(type, (event) => this.light(blockOf(event.target) ?? this.pinned), target);
    }
    root.addEventListener("mouseleave", this.onLeave);
    root.addEventListener("click", (event) => this.pin(blockOf(event.target)));
  }

  footPart(name, title, Panel) {
    const card = html(this.foot, "section", { class: `card ${name}`, "aria-label": title });
    const heading = html(card, "h2", {}, title);
    const panel = new Panel(html(card, "div", { class: "body" }), heading);
    panel.card = card;
    return panel;
  }

  card(parent, title, name) {
    const card = html(parent, "section", { class: `card ${name}`, "aria-label": title });
    const heading = html(card, "h2", {}, title);
    return { card, title: heading, body: html(card, "div", { class: "body" }) };
  }

  // Take a portion of frames (views/stage/payload.py) and draw.
  update(data) {
    this.theme();
    const fresh = data.trace_id !== this.recording.traceId;
    if (this.recording.append(data) || fresh) this.asked = -1;
    if (fresh) {
      this.index = 0;
      this.showRows(this.recording.header.opens === "worker_rows");
    }
    if (this.recording.missing) return this.askForMore();
    if (this.wanted !== null && (this.wanted <= this.recording.last || this.recording.complete)) {
      this.index = Math.min(this.wanted, this.recording.last);
      this.wanted = null;
    } else if (this.wanted !== null) this.index = this.recording.last;
    this.redraw();
    this.askForMore();
  }

  move(direction, size) {
    this.seek(this.recording.target(this.index, direction, size));
  }

  seek(index) {
    if (!this.recording.frames.length) return;
    this.wanted = null;
    const before = this.index;
    this.index = Math.min(Math.max(Math.round(index) || 0, 0), this.recording.last);
    if (index === Infinity) this.index = this.recording.last;
    this.redraw();
    if (this.index === before + 1 && this.recording.header.parts.swap) this.swap.fly(this.root, this.pool, this.recording.frames[this.index]);
    this.writeAddress();
    this.askForMore();
  }

  askForMore() {
    const held = this.recording.missing ? this.recording.frames.length : this.recording.last + 1;
    const near = this.recording.last - this.index < LOOK_AHEAD || this.wanted !== null;
    if (!this.hooks.need || this.asked === held || (!this.recording.missing && (this.recording.complete || !near))) return;
    this.asked = held;
    this.hooks.need(held);
    const frame = this.recording.frames[this.index];
    if (frame) this.drawChips(frame);
  }

  // The cursor has come to the end of what is recorded, and the next portion is on its way.
  get isWaiting() {
    return this.asked === this.recording.last + 1 && this.index === this.recording.last && !this.recording.complete;
  }

  redrawSoon() {
    cancelAnimationFrame(this.pendingDraw);
    this.pendingDraw = requestAnimationFrame(() => this.redraw());
  }

  redraw() {
    const { recording } = this;
    const frame = recording.frames[this.index];
    if (!frame || !this.root.clientWidth) return;
    this.fitScreen();
    this.fitFoot();
    useFontOf(this.root);
    const previous = recording.frames[this.index - 1];
    this.drawWords(frame);
    this.drawLegend();
    this.transport.update(recording, this.index);
    this.drawRowsButton(frame);
    if (this.rowsOpen) this.rows.draw(recording, frame);
    else this.requests.draw(recording, frame, previous);
    this.pool.draw(recording, frame, previous);
    this.queue.draw(recording, frame);
    this.events.draw(recording, this.index);
    this.slots.draw(recording, this.index);
    const { parts } = recording.header;
    if (parts.chains) this.chains.draw(recording, frame, this.index);
    if (parts.family) this.family.draw(recording, frame, this.index);
    if (parts.shares) this.shares.draw(recording, this.index);
    if (parts.swap) this.swap.draw(recording, frame);
    this.correction.draw(recording, frame);
    this.light(this.lit ?? this.pinned);
    if (!this.rowsOpen) this.requests.show(frame.request); // scrolling at the very end: until here nobody has asked where anything is
    this.pool.showFirst(frame.now.blocks);
    this.slots.showNow();
  }

  // On a large screen or a projector everything grows, instead of more empty space.
  fitScreen() {
    const zoom = Math.min(Math.max(Math.min(window.innerWidth / 1300, window.innerHeight / 735), 1), LARGEST_ZOOM);
    this.root.style.setProperty("--zoom", zoom.toFixed(3));
  }

  // The parts that this run needs below the panels; a run that needs none leaves its room to the panels.
  fitFoot() {
    const { parts, num_sequences: sequences } = this.recording.header;
    const signature = JSON.stringify([this.recording.traceId, parts]);
    if (signature === this.footDrawn) return;
    this.footDrawn = signature;
    this.swap.card.style.flex = `0 1 min(62%, ${150 + 90 * this.recording.header.num_cpu_blocks}px)`;
    for (const name of ["chains", "family", "shares", "swap"]) this[name].card.style.display = parts[name] ? "" : "none";
    const height = parts.family && sequences > 5 ? 118 : Object.values(parts).some(Boolean) ? 78 : 0;
    this.foot.style.display = height ? "" : "none";
    this.root.style.setProperty("--foot", `${height}px`);
    this.root.style.setProperty("--foot-and-gap", `${height ? height + 10 : 0}px`);
    this.root.classList.toggle("paper", this.recording.isPaper);
    this.root.classList.toggle("beams", this.recording.hasBeams);
    this.root.classList.toggle("dense", sequences > 5);
    this.queueWords.textContent = this.recording.isPaper ? " · taken from and given back to the head" : " · the head is taken next, the tail is kept longest";
    forgetSizes();
  }

  drawWords(frame) {
    const { header } = this.recording;
    this.title.textContent = header.title;
    this.title.title = [header.goal, header.about].filter(Boolean).join("\n"); // what has no room as a chip
    this.text.textContent = frame.say.text;
    const note = this.recording.notes[frame.seq];
    drawNote(this.note, this.recording, frame);
    this.why.textContent = frame.say.why;
    this.second.title = note ? `${note}\n${frame.say.why}` : frame.say.why;
    this.symbol.textContent = frame.say.symbol;
    this.symbol.title = frame.say.symbol ? symbolTitle(this.recording, frame.say) : "";
    this.symbol.parentElement.title = frame.say.text;
    this.where.textContent = frame.op;
    this.drawKernelsLink(frame);
    this.drawChips(frame);
  }

  // The worker's rows take the place of the requests' cards, so that nothing else moves.
  toggleRows() {
    this.showRows(!this.rowsOpen);
    forgetSizes();
    this.redraw();
  }

  showRows(open) {
    this.rowsOpen = open;
    this.root.classList.toggle("rows-open", open);
  }

  drawRowsButton(frame) {
    const number = numDifferences(frame);
    setText(this.requestsTitle, this.rowsOpen ? "Tables and worker's rows" : "Requests and block tables");
    setText(this.rowsButton, this.rowsOpen ? "back" : `worker's rows${number ? ` ≠ ${number}` : ""}`);
    this.rowsButton.classList.toggle("differ", number > 0);
    setAttributes(this.rowsButton, { "aria-pressed": String(this.rowsOpen), hidden: this.recording.isPaper ? "" : null });
  }

  // The kernels screen at this frame, for the run that the address names; a run without a model and a saved page have none.
  drawKernelsLink(frame) {
    const has = Boolean(this.hooks.need) && this.recording.header.model !== "none";
    this.kernels.style.display = this.rowsLink.style.display = has ? "" : "none";
    if (!has) return;
    const here = new URL(window.location.href).searchParams;
    const there = new URLSearchParams({ screen: "kernels", scene: here.get("scene") || "", step: String(this.wanted ?? frame.seq) });
    for (const name of ["model", "backend", "layers"]) if (here.get(name)) there.set(name, here.get(name));
    for (const link of [this.kernels, this.rowsLink]) setAttributes(link, { href: `?${there}` });
  }

  // What the marks in the left panel mean: those that this run can have.
  drawLegend() {
    const { recording } = this;
    if (this.rowsOpen) return setText(this.legend, rowsLegend(recording.frames[this.index]));
    if (recording.isPaper) {
      const marks = recording.header.parts.family ? ["×2: two references"] : ["bold: generated"];
      marks.push(recording.asStrips ? "bar: filled slots" : "dashed: not written");
      if (recording.frames[this.index].requests.some((r) => r.forced.length)) marks.push("dotted: forced");
      return setText(this.legend, marks.join(" · "));
    }
    const onlyFull = !recording.hasGroups && ["full", "MLA"].includes(recording.groups[0].label);
    const states = recording.groups.some((g) => g.is_state) ? ["@8 state after 8 tokens"] : [];
    if (recording.hasGroups && states.length) states.unshift("#4/8 hash of 4 of 8 tokens");
    const parts = onlyFull
      ? ["# full and hashed: another request may share it", "dashed: key and value not written yet", "bold: generated"]
      : [...(recording.header.caching ? ["# hashed: may be shared"] : []), ...states, "∅ null: nothing kept", recording.groups.length > FEW_LANES ? "slanted: not written yet" : "dashed: not written yet"];
    if (recording.groups.length > FEW_LANES && recording.groups.some((g) => shortLabel(g.label) !== g.label)) parts.push("w 8: window of 8 tokens");
    const text = parts.join(" · ");
    if (this.legend.textContent !== text) this.legend.textContent = text;
  }

  // Only what was really checked in this run, up to this frame.
  drawChips(frame) {
    const { engine, pair, about, other_window: otherWindow } = this.recording.header;
    const chips = [[engine.label, "engine", `This run is that of ${engine.title}`], [about, "about", "The model that runs and the size of the pool"]];
    if (otherWindow) chips.splice(1, 0, [otherWindow.text, "window", otherWindow.title]);
    if (frame.requests.some((r) => r.forced.length)) chips.splice(1, 0, ["forced tokens", "", "The scenario dictates these tokens; each is marked"]);
    if (pair && this.hooks.need) chips.splice(1, 0, [pair.label, "pair", "Opens the scene about the same with the other engine", `?scene=${encodeURIComponent(pair.scene)}`]);
    if (this.isWaiting) chips.push(["the model computes the next step", "wait", "Nothing further is recorded yet; it will appear by itself"]);
    if (frame.kind === "engine_failed") chips.push(["run stopped by an error", "bad", frame.say.text]);
    else chips.push(["✓ invariants hold", "ok", "Every recorded frame was checked: each block is free, used or null; counts, tables, hashes and the queue agree"]);
    if (frame.agreed) chips.push([`✓ ${frame.agreed}`, "ok", "The kernel's attention output was compared with the plain reference"]);
    const signature = JSON.stringify(chips);
    if (signature === this.chipsDrawn) return;
    this.chipsDrawn = signature;
    this.chips.replaceChildren();
    for (const [text, kind, title, href] of chips) html(this.chips, href ? "a" : "span", { class: `chip ${kind}`, title: `${text}\n${title}`, href, target: href ? "_self" : null }, text);
  }

  key(event) {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || !this.root.isConnected) return;
    const target = event.composedPath()[0];
    if (target instanceof Element && target.closest("input, textarea, select, [contenteditable=true], [role=combobox], [role=dialog]")) return;
    const onButton = target instanceof Element && target.closest("button, a, [role=button]");
    if (onButton && (event.key === " " || event.key === "Enter")) return;
    if (event.key === "Escape") return this.pin(null);
    if (event.key === "w" && this.recording.frames.length && !this.recording.isPaper) return this.toggleRows();
    if (event.key === "k" && this.kernels.style.display !== "none") return this.kernels.click();
    if (this.recording.frames.length && this.transport.key(event)) event.preventDefault();
  }

  // Light one block up wherever it is drawn. A click pins it, so that it stays lit while stepping.
  light(block) {
    const next = block ?? null;
    if (next === null && this.lit === null) return;
    const lights = next === null ? [] : [...this.root.querySelectorAll(`[data-block="${CSS.escape(next)}"], [data-blocks~="${CSS.escape(next)}"]`)];
    this.root.querySelectorAll(".lit").forEach((e) => e.classList.remove("lit"));
    lights.forEach((e) => e.classList.add("lit"));
    this.pool.tell(next);
    this.lit = next;
  }

  pin(block) {
    this.pinned = block === this.pinned ? null : block;
    this.light(this.pinned);
  }

  theme() {
    const background = getComputedStyle(this.root).getPropertyValue("--st-background-color").trim();
    this.root.dataset.theme = isDark(background) ? "dark" : "light";
  }

  writeAddress() {
    clearTimeout(this.addressTimer);
    this.addressTimer = setTimeout(() => {
      const address = new URL(window.location.href);
      address.searchParams.set("step", String(this.index));
      window.history.replaceState(window.history.state, "", address);
    }, ADDRESS_DELAY);
  }

  destroy() {
    document.removeEventListener("keydown", this.onKey);
    this.resize.disconnect();
    this.transport.destroy();
    clearTimeout(this.addressTimer);
  }
}

function symbolTitle(recording, { symbol, rule }) {
  if (recording.isPaper) return `This is what vLLM's first release does in ${symbol}${rule ? ` (${rule} of the paper)` : ""}`;
  return `This is what vLLM V1 does in ${symbol}${rule ? ` (rule ${rule})` : ""}`;
}

function blockOf(target) {
  const element = target instanceof Element ? target.closest("[data-block]") : null;
  return element ? element.dataset.block : null;
}

function stepOfAddress() {
  const text = new URL(window.location.href).searchParams.get("step");
  return text !== null && /^\d{1,7}$/.test(text) ? Number(text) : null;
}

function mountStage(root, hooks) {
  return new Stage(root, hooks);
}
