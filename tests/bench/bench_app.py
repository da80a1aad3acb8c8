"""The app as a person meets it: cold first paint, key to paint among recorded frames, and a live engine step. Run: python -m tests.bench.bench_app

Times are taken inside headless Chromium: from the key (or the request for more frames) to the first moment after the next animation frame. No camera.
"""

from __future__ import annotations

import statistics
import sys
import time
from itertools import pairwise

from playwright.sync_api import Page

from tests.browser.server import chromium, running_app

RUNS = 60
READY = ".stage .say .first b"

STEP = """async (key) => {
  const root = [...document.querySelectorAll("*")].map((e) => e.shadowRoot?.querySelector(".stage") ?? (e.matches(".stage") ? e : null)).find(Boolean);
  const counter = root.querySelector(".counter");
  const before = counter.textContent;
  const start = performance.now();
  document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, composed: true }));
  const script = performance.now() - start;
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return { script, paint: performance.now() - start, moved: counter.textContent !== before };
}"""

WATCH = """() => {
  const find = () => [...document.querySelectorAll("*")].map((e) => e.shadowRoot?.querySelector(".stage") ?? (e.matches(".stage") ? e : null)).find(Boolean);
  window.grown = [];
  let last = -1;
  const look = () => {
    const text = find()?.querySelector(".counter")?.textContent ?? "";
    const total = Number(/\\/ (\\d+)/.exec(text)?.[1] ?? -1);
    if (total !== last) { window.grown.push([performance.now(), total, !text.endsWith("\u2026")]); last = total; }
    requestAnimationFrame(look);
  };
  look();
}"""


def first_paint(scene: str) -> tuple[float, float]:
    """Seconds from the start of the `streamlit run` process, and from the page's request, until the first frame of the scene is drawn.
    The browser is open before, as a person's is."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        start = time.perf_counter()
        with running_app() as address:
            asked = time.perf_counter()
            page.goto(f"{address}/?scene={scene}")
            page.locator(READY).wait_for(timeout=60_000)
            now = time.perf_counter()
    return now - start, now - asked


def growth(page: Page, address: str, scene: str) -> list[float]:
    """Milliseconds between two successive live engine steps appearing on the screen."""
    page.goto(f"{address}/?scene={scene}")
    page.locator(READY).wait_for(timeout=60_000)
    while not page.evaluate("() => window.grown.length && window.grown.at(-1)[2]"):
        page.wait_for_timeout(300)
    times = [t for t, total, _ in page.evaluate("() => window.grown") if total > 0]
    return [b - a for a, b in pairwise(times)]


def row(name: str, values: list[float], goal: str, unit: str = "ms") -> None:
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    print(f"{name:46} {statistics.median(values):8.1f} {p95:8.1f} {unit:3} {len(values):4}   {goal}")


def main() -> int:
    print(f"{'':46} {'median':>8} {'p95':>8} {'':3} {'n':>4}   goal")
    cold = [first_paint("figure-6") for _ in range(3)]
    row("first paint of Figure 6, from process start", [a for a, _ in cold], "under 6 s", "s")
    row("first paint of Figure 6, from the request", [b for _, b in cold], "", "s")
    with running_app() as address, chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        page.add_init_script(f"({WATCH})()")
        growth(page, address, "figure-7-v1")  # loads the model; afterwards each choice of layer is a run of its own
        page.wait_for_timeout(2000)
        live = [ms for layer in range(4) for ms in growth(page, address, f"same-prompt-twice&layers={layer}")]
        row("a live engine step with tiny, end to end", live, "under 150 ms")
        for scene in ("figure-6-prepared", "same-prompt-twice"):
            page.goto(f"{address}/?scene={scene}&step=0")
            page.locator(READY).wait_for()
            page.wait_for_function(
                "() => [...document.querySelectorAll('*')].some((e) => (e.shadowRoot ?? e).querySelector?.('.counter')?.textContent.match(/\\d$/))",
                timeout=60_000,
            )
            page.wait_for_timeout(1000)
            results = [page.evaluate(STEP, key) for key in (["ArrowRight"] * 30 + ["ArrowLeft"] * 30) * (RUNS // 60)]
            assert sum(r["moved"] for r in results) >= RUNS - 2, "the keys moved nothing"
            row(f"a step among recorded frames, {scene}", [r["paint"] for r in results], "median under 50 ms")
            row("   of which script", [r["script"] for r in results], "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
