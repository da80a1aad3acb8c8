// What the scenario's author says beside the events: notes, with a mark where no source confirms the drawing's value, and corrections of what people may have read.
class CorrectionBox {
  constructor(parent) {
    this.element = html(parent, "aside", { class: "correction", "aria-label": "What you may have read" });
    this.element.style.display = "none";
    this.shown = "";
  }

  draw(recording, frame) {
    const found = recording.corrections[frame.seq] || [];
    const signature = JSON.stringify([recording.traceId, found]);
    if (signature === this.shown) return;
    this.shown = signature;
    this.element.replaceChildren();
    this.element.style.display = found.length ? "" : "none";
    for (const { read, really, rule } of found) {
      html(this.element, "h3", {}, "What you may have read");
      html(this.element, "p", { class: "read" }, read);
      html(this.element, "h3", {}, "What really happens");
      const line = html(this.element, "p", { class: "really" }, `${really} `);
      html(line, "span", { class: "muted" }, `(rule ${rule})`);
    }
  }
}

function drawNote(element, recording, frame) {
  const note = recording.notes[frame.seq];
  const unconfirmed = Boolean(note) && recording.unconfirmed.includes(frame.seq);
  const signature = `${note || ""}/${unconfirmed}`;
  if (element.dataset.shown === signature) return;
  element.dataset.shown = signature;
  element.replaceChildren(note ? `${note} ` : "");
  if (unconfirmed) {
    html(element, "span", { class: "unconfirmed", title: "no source confirms this value of the drawing" }, "unconfirmed");
    element.append(" ");
  }
}
