// What happened around the cursor, one line per event, and the slots of the newest slot mapping.
const LINES_BEFORE = 5;
const LINES_AFTER = 4;
const SLOTS_SHOWN = 512;

class EventsPanel {
  constructor(parent, seek) {
    this.list = html(parent, "ol", { class: "events" });
    this.lines = [];
    for (let i = 0; i < LINES_BEFORE + 1 + LINES_AFTER; i += 1) {
      const line = html(this.list, "li");
      const button = html(line, "button", { type: "button", tabindex: -1 });
      const entry = { line, button, number: html(button, "i"), text: html(button, "span"), index: 0 };
      button.addEventListener("click", () => seek(entry.index));
      this.lines.push(entry);
    }
  }

  draw(recording, index) {
    this.lines.forEach((entry, i) => {
      const at = index - LINES_BEFORE + i;
      const frame = recording.frames[at];
      entry.index = at;
      entry.line.className = at === index ? "now" : at > index ? "later" : "";
      entry.line.style.visibility = frame ? "visible" : "hidden";
      entry.number.textContent = frame ? String(frame.seq) : "";
      entry.text.textContent = frame ? frame.say.text : "";
      setAttributes(entry.button, { title: frame && at !== index ? frame.say.text : null, "aria-current": at === index ? "step" : null });
    });
  }
}

class SlotsPanel {
  constructor(parent) {
    this.title = html(parent, "h2", {}, "Slots");
    this.formula = html(parent, "p", { class: "formula" });
    this.body = html(parent, "div", { class: "slots" });
    this.candidates = new CandidatesList(parent);
    this.signature = "";
  }

  // The slot mappings of the newest operation that has some, at or before the cursor.
  newest(recording, index) {
    let at = index;
    while (at >= 0 && !recording.frames[at].slots) at -= 1;
    if (at < 0) return null;
    const operation = recording.frames[at].op_index;
    const mappings = [];
    const current = recording.frames[at].slots;
    for (let i = at; i >= 0 && recording.frames[i].op_index === operation; i -= 1) {
      if (recording.frames[i].slots) mappings.unshift(recording.frames[i].slots);
    }
    return { frame: recording.frames[at], current, mappings, fresh: at === index };
  }

  draw(recording, index) {
    const found = this.newest(recording, index);
    const here = recording.frames[index];
    const choice = recording.choiceBefore(index);
    const chosen = choice !== null && (!found || choice.seq > found.frame.seq);
    this.body.style.display = this.formula.style.display = chosen ? "none" : "";
    this.candidates.element.style.display = chosen ? "" : "none";
    if (chosen) return this.drawCandidates(recording, choice, here);
    const signature = found ? `${recording.traceId}/${found.frame.seq}/${found.fresh}/${found.frame.step === here.step}` : "";
    if (signature === this.signature && signature) return;
    this.signature = signature;
    this.body.replaceChildren();
    if (!found) {
      this.title.textContent = "Slots";
      this.formula.textContent = recording.groups.every((g) => g.is_state) ? "Recurrent states have no slots: a block holds one state." : "Nothing has been written yet.";
      return;
    }
    this.title.textContent = found.frame.step === here.step ? "Slots of this step" : `Slots of step ${found.frame.step}`;
    const withSlots = found.mappings.filter((m) => m.slots.some((slot) => slot >= 0));
    this.formula.textContent = this.sentence(recording, found.fresh || !withSlots.length ? found.current : withSlots[withSlots.length - 1]);
    let shown = 0;
    for (const [title, mappings] of this.parts(recording, found.mappings)) {
      if (shown) html(this.body, "span", { class: "slots-break" });
      if (title) html(this.body, "span", { class: "slots-group" }, title);
      for (const mapping of mappings) {
        mapping.slots.forEach((_, i) => {
          shown += 1;
          if (shown <= SLOTS_SHOWN) this.drawChip(recording, mapping, i, found.fresh && mapping === found.current);
        });
      }
    }
    if (shown > SLOTS_SHOWN) html(this.body, "span", { class: "muted" }, `and ${shown - SLOTS_SHOWN} more`);
    this.scroll = true;
  }

  drawCandidates(recording, choice, here) {
    const signature = `${recording.traceId}/candidates/${choice.seq}/${choice === here}`;
    if (signature === this.signature) return;
    this.signature = signature;
    const kept = choice.beams.candidates.filter((c) => c.sequence !== null).length;
    const forced = choice.beams.candidates.some((c) => c.forced);
    const several = new Set(recording.choices.map((f) => f.beams.group)).size > 1;
    this.title.textContent = `Candidates${several ? ` of ${choice.beams.group}` : ""}: ${kept} of ${choice.beams.candidates.length} ${forced ? "dictated" : "kept"}`;
    this.candidates.draw(recording, choice, choice === here);
  }

  // Bring the slots that have just been mapped into view, once.
  showNow() {
    const first = this.scroll ? this.body.querySelector(".slot-chip.now") : null;
    this.scroll = false;
    if (first) this.body.scrollTop = Math.max(first.offsetTop - this.body.offsetTop - 22, 0);
  }

  // The mappings under the name of their group and their rank, where there are several.
  parts(recording, mappings) {
    const parts = new Map();
    for (const mapping of mappings) {
      const title = [recording.hasGroups ? recording.groups[mapping.group].label : "", mapping.rank === null ? "" : `rank ${mapping.rank}`].filter(Boolean).join(", ");
      parts.set(title, [...(parts.get(title) || []), mapping]);
    }
    return parts;
  }

  // The arithmetic of the last token that has a slot here.
  sentence(recording, { positions, slots, group, rank }) {
    const size = recording.groups[group].block_size;
    let last = slots.length - 1;
    while (last >= 0 && slots[last] < 0) last -= 1;
    if (last < 0) return slots.length ? `rank ${rank} keeps none of these tokens` : "";
    const slot = slots[last];
    return `token ${positions[last]} → block ${Math.floor(slot / size)} × ${size} + offset ${slot % size} = slot ${slot}`;
  }

  drawChip(recording, mapping, i, fresh) {
    const size = recording.groups[mapping.group].block_size;
    const number = mapping.slots[i];
    const here = number >= 0;
    const block = here ? Math.floor(number / size) : null;
    const where = here ? `block ${block} × ${size} + ${number % size} = slot ${number}` : "another rank's memory, no slot here";
    const chip = html(this.body, "span", { class: `slot-chip${fresh ? " now" : ""}${here ? "" : " elsewhere"}`, "data-block": block, title: `token ${mapping.positions[i]} of ${mapping.request} → ${where}` });
    chip.style.setProperty("--owner", requestColour(recording, mapping.request));
    html(chip, "b", {}, here ? String(number) : "−1");
    html(chip, "span", {}, recording.token(mapping.token_ids[i]));
  }
}
