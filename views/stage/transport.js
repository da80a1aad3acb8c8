// Buttons, scrubber and keys. It knows nothing of blocks: it moves a cursor and says so.
const SPEEDS = [0.5, 1, 2, 4];
const STEP_SIZES = ["event", "operation", "engine step"];
const FLAG_ROOM = 11; // pixels between two flags
const MILLISECONDS_PER_STEP = 1000; // at speed 1

const ICONS = {
  first: "M5 4V16M16 4L8 10L16 16Z",
  back: "M14 4L6 10L14 16Z",
  forward: "M6 4L14 10L6 16Z",
  last: "M15 4V16M4 4L12 10L4 16Z",
  play: "M6 3.5L16 10L6 16.5Z",
  pause: "M6 4H8.5V16H6ZM11.5 4H14V16H11.5Z",
};

class Transport {
  // hooks: move(direction, size), seek(index), size of the recording comes with update().
  constructor(parent, hooks) {
    this.hooks = hooks;
    this.size = 0;
    this.speed = 1;
    this.timer = null;
    this.build(parent);
  }

  build(parent) {
    const bar = html(parent, "div", { class: "bar", role: "toolbar", "aria-label": "Playback" });
    this.buttons = {};
    const button = (name, label, action, text) => {
      const element = html(bar, "button", { type: "button", class: name === "forward" ? "main" : "", title: label, "aria-label": label });
      const icon = svg(element, "svg", { viewBox: "0 0 20 20", width: 18, height: 18, "aria-hidden": "true" });
      svg(icon, "path", { d: ICONS[name], fill: "currentColor", stroke: "currentColor", "stroke-width": 1.4, "stroke-linejoin": "round" });
      if (text) html(element, "span", {}, text);
      element.addEventListener("click", (event) => {
        action();
        if (event.detail > 0) element.blur(); // after a mouse click the space bar means play and pause again
      });
      this.buttons[name] = element;
      return element;
    };
    button("first", "First frame (Home)", () => this.go(0));
    button("back", "One step back (←)", () => this.move(-1));
    button("forward", "One step forward (→)", () => this.move(1), "Step");
    button("play", "Play or pause (space bar)", () => this.toggle(), "Play");
    button("last", "Last recorded frame (End)", () => this.go(Infinity));
    this.buildTrack(bar);
    this.counter = html(bar, "span", { class: "counter", title: "Engine step · this frame / the last one that is recorded (… more to come)" });
    this.sizeSelect = this.select(bar, "Step size (keys 1, 2, 3)", STEP_SIZES, (value) => (this.size = STEP_SIZES.indexOf(value)));
    this.speedSelect = this.select(bar, "Speed of playing", SPEEDS.map((s) => `${s}×`), (value) => this.setSpeed(parseFloat(value)));
    this.speedSelect.value = "1×";
  }

  select(bar, label, options, action) {
    const select = html(bar, "select", { title: label, "aria-label": label });
    for (const option of options) html(select, "option", { value: option }, option);
    select.addEventListener("change", () => {
      action(select.value);
      select.blur();
    });
    return select;
  }

  buildTrack(bar) {
    this.track = html(bar, "div", { class: "track", role: "slider", tabindex: 0, "aria-label": "Position in the recording", "aria-valuemin": 0 });
    const picture = svg(this.track, "svg", { width: "100%", height: 32, "aria-hidden": "true" });
    svg(picture, "line", { x1: 0, x2: "100%", y1: 16, y2: 16, class: "rail" });
    this.done = svg(picture, "line", { x1: 0, x2: 0, y1: 16, y2: 16, class: "rail done" });
    this.marks = svg(picture, "g");
    this.knob = svg(picture, "circle", { cx: 0, cy: 16, r: 8, class: "knob" });
    const seek = (event) => {
      const box = this.track.getBoundingClientRect();
      const share = (event.clientX - box.left - 8) / Math.max(box.width - 16, 1);
      this.pause();
      this.hooks.seek(Math.round(share * this.lastIndex));
    };
    this.track.addEventListener("pointerdown", (event) => {
      this.track.setPointerCapture(event.pointerId);
      seek(event);
    });
    this.track.addEventListener("pointermove", (event) => {
      if (event.buttons & 1) seek(event);
    });
  }

  get stepSize() {
    return ["event", "operation", "step"][this.size];
  }

  move(direction) {
    this.pause();
    this.hooks.move(direction, this.stepSize);
  }

  go(index) {
    this.pause();
    this.hooks.seek(index);
  }

  setSpeed(speed) {
    this.speed = speed;
    if (this.timer) this.schedule();
  }

  setSize(size) {
    this.size = size;
    this.sizeSelect.value = STEP_SIZES[size];
  }

  toggle() {
    if (this.timer) this.pause();
    else this.play();
  }

  play() {
    if (this.atEnd && this.complete) this.hooks.seek(0);
    this.schedule();
    this.showPlaying();
  }

  schedule() {
    clearInterval(this.timer);
    this.timer = setInterval(() => {
      if (this.atEnd && this.complete) this.pause();
      else this.hooks.move(1, this.stepSize);
    }, MILLISECONDS_PER_STEP / this.speed);
  }

  pause() {
    if (!this.timer) return;
    clearInterval(this.timer);
    this.timer = null;
    this.showPlaying();
  }

  showPlaying() {
    const playing = this.timer !== null;
    this.buttons.play.querySelector("path").setAttribute("d", playing ? ICONS.pause : ICONS.play);
    this.buttons.play.querySelector("span").textContent = playing ? "Pause" : "Play";
    this.buttons.play.classList.toggle("on", playing);
  }

  // A key of the page. True when it was meant for the stage.
  key(event) {
    const actions = {
      ArrowRight: () => this.move(1), ArrowLeft: () => this.move(-1), PageDown: () => this.move(1), PageUp: () => this.move(-1),
      Home: () => this.go(0), End: () => this.go(Infinity), " ": () => this.toggle(),
      1: () => this.setSize(0), 2: () => this.setSize(1), 3: () => this.setSize(2),
    };
    const action = actions[event.key];
    if (!action) return false;
    action();
    return true;
  }

  // Show where the cursor is. `marks` are drawn again only when the recording grew or the width changed.
  update(recording, index) {
    this.lastIndex = recording.last;
    this.complete = recording.complete;
    this.atEnd = index >= recording.last;
    const { width } = sizeOf(this.track);
    const x = (i) => 8 + (width - 16) * (recording.last > 0 ? i / recording.last : 0);
    if (this.drawn !== `${recording.traceId}/${recording.frames.length}/${width}/${Object.keys(recording.corrections).length}`) {
      this.drawn = `${recording.traceId}/${recording.frames.length}/${width}/${Object.keys(recording.corrections).length}`;
      this.drawMarks(recording, x);
    }
    setAttributes(this.done, { x2: x(index) });
    setAttributes(this.knob, { cx: x(index) });
    const frame = recording.frames[index];
    setAttributes(this.track, { "aria-valuemax": recording.last, "aria-valuenow": index, "aria-valuetext": `${index}: ${frame.say.text}` });
    this.counter.textContent = `step ${frame.step} · ${index} / ${recording.last}${recording.complete ? "" : " …"}`;
    this.buttons.first.disabled = this.buttons.back.disabled = index === 0;
    this.buttons.last.disabled = this.atEnd;
    this.buttons.forward.disabled = this.atEnd && recording.complete;
  }

  drawMarks(recording, x) {
    this.marks.replaceChildren();
    const taken = new Map();
    let flagged = -FLAG_ROOM;
    recording.frames.forEach((frame, index) => {
      const at = Math.round(x(index));
      const step = index > 0 && frame.step !== recording.frames[index - 1].step;
      if (recording.corrections[frame.seq] && at - flagged > FLAG_ROOM) this.drawCorrection((flagged = at), index);
      if (step) svg(this.marks, "line", { x1: at, x2: at, y1: 25, y2: 30, class: "mark-step" });
      const kind = markOf(frame);
      if (!kind || taken.get(at) >= kind.weight) return;
      taken.set(at, kind.weight);
      const colour = kind.colour === "request" ? requestColour(recording, frame.request) : kind.colour;
      if (kind.diamond) svg(this.marks, "path", { d: `M${at} 4L${at + 5} 10L${at} 16L${at - 5} 10Z`, style: `fill:${colour}` });
      else svg(this.marks, "rect", { x: at - 1.5, y: kind.weight > 1 ? 8 : 11, width: 3, height: kind.weight > 1 ? 16 : 10, rx: 1.5, style: `fill:${colour}` });
    });
  }

  // A small flag above the rail: here the stage corrects what people may have read. A click on it leads there.
  drawCorrection(at, index) {
    const flag = svg(this.marks, "g", { class: "mark-correction" });
    hint(flag, "what you may have read, and what really happens");
    flag.addEventListener("pointerdown", (event) => {
      event.stopPropagation();
      this.go(index);
    });
    svg(flag, "circle", { cx: at, cy: 1, r: 6 });
    svg(flag, "text", { x: at, y: 4.6, "text-anchor": "middle" }, "!");
  }

  destroy() {
    this.pause();
  }
}

// How an event shows on the scrubber: allocations in the request's colour, hashes violet, copies black, frees grey, what went wrong as a red diamond.
function markOf(frame) {
  switch (frame.kind) {
    case "blocks_allocated":
      return frame.request ? { colour: "request", weight: 3 } : null;
    case "blocks_touched":
      return { colour: "request", weight: 3 };
    case "block_cached":
      return { colour: "var(--hash)", weight: 2 };
    case "sequence_forked":
      return { colour: "request", weight: 2 };
    case "beams_chosen":
    case "copy_queued":
      return { colour: "var(--ink)", weight: 3 };
    case "blocks_freed":
    case "blocks_skipped":
      return { colour: "var(--mute)", weight: 2 };
    case "token_sampled":
      return { colour: "request", weight: 1 };
    case "blocks_swapped_out":
    case "blocks_swapped_in":
    case "request_preempted":
    case "block_evicted":
    case "allocation_refused":
    case "engine_failed":
      return { colour: "var(--bad)", weight: 4, diamond: true };
    default:
      return null;
  }
}
