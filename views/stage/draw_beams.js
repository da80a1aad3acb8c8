// Beam search: the candidates of the newest selection, best first, as a list. It takes the place of the slots until the next slots are mapped.
class CandidatesList {
  constructor(parent) {
    this.element = html(parent, "div", { class: "candidates", role: "table", "aria-label": "Candidates, best first" });
  }

  draw(recording, frame, fresh) {
    const { beams } = frame;
    this.element.replaceChildren();
    const ranks = beams.candidates.map((c, i) => ({ ...c, rank: i + 1 }));
    for (const candidate of ranks) {
      const kept = candidate.sequence !== null;
      const line = html(this.element, "div", { class: `candidate${kept ? " kept" : candidate.finished ? " ends" : " dropped"}${fresh && kept ? " now" : ""}`, role: "row", title: candidateTitle(recording, candidate) });
      line.style.setProperty("--owner", requestColour(recording, candidate.sequence || candidate.parent));
      html(line, "i", { role: "cell" }, String(candidate.rank));
      html(line, "span", { class: "parent", role: "cell" }, candidate.parent);
      html(line, "b", { role: "cell", class: candidate.forced ? "forced" : null }, recording.token(candidate.token));
      html(line, "span", { class: "logprob", role: "cell" }, logprobText(candidate.logprob));
      html(line, "span", { class: "fate", role: "cell" }, fateWords(candidate));
    }
  }
}

function fateWords(candidate) {
  if (candidate.finished) return "ends";
  return candidate.sequence === null ? "dropped" : `→ ${candidate.sequence}`;
}

function candidateTitle(recording, candidate) {
  const what = `${candidate.parent} followed by “${recording.token(candidate.token)}”`;
  const sum = candidate.logprob === null ? "" : `log-probability of all its outputs: ${candidate.logprob.toFixed(3)}`;
  const fate = candidate.finished ? "it ends with a stop token" : candidate.sequence === null ? "not among the best: dropped" : candidate.sequence === candidate.parent ? `goes on in ${candidate.sequence}, its parent's sequence` : `goes on as ${candidate.sequence}, forked from ${candidate.parent}`;
  return [what, sum, fate, candidate.forced ? "dictated by the scenario" : ""].filter(Boolean).join("\n");
}
