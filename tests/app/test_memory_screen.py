"""The memory screen without a browser: its five parts, its settings in the address, good and bad files."""

from __future__ import annotations

import json
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from scenarios.workloads import workload_names
from tests.conftest import ROOT

TIMEOUT = 120
GOOD = b"prompt_len,output_len\n" + b"".join(b"%d,%d\n" % (20 + i % 50, 30 + i % 90) for i in range(300))


def open_memory(**address: str) -> AppTest:
    app = AppTest.from_file(str(ROOT / "app.py"), default_timeout=TIMEOUT)
    for name, value in {"screen": "memory", **address}.items():
        app.query_params[name] = value
    app.run()
    assert not app.exception
    return app


def charts(app: AppTest) -> list[dict[str, Any]]:
    return [json.loads(chart.proto.spec) for chart in app.get("plotly_chart")]


def shown(app: AppTest) -> str:
    return " ".join(element.value for element in (*app.markdown, *app.caption)).replace("\\", "")


def bars_of(chart: dict[str, Any], source: str) -> dict[str, float]:
    """System to percent, the parts of each bar added up."""
    sums: dict[str, float] = {}
    for trace in chart["data"]:
        for system, who, percent in zip(*trace["y"], trace["x"], strict=True):
            if who == source:
                sums[system] = sums.get(system, 0.0) + percent
    return sums


@pytest.mark.parametrize(("part", "num_charts"), [("Waste", 1), ("Slots", 2), ("Requests at once", 1), ("Block size", 1), ("Sharing", 1)])
def test_every_part_opens_by_its_address_with_its_charts_and_their_exports(part: str, num_charts: int) -> None:
    app = open_memory(part=part, requests="200")
    assert not app.error
    assert len(charts(app)) == num_charts
    assert [button.label for button in app.get("download_button")] == ["CSV"] * num_charts
    assert "differs from the paper" in shown(app) or part == "Slots"


def test_the_bars_of_the_four_systems_stand_beside_the_papers_and_are_whole() -> None:
    (chart,) = charts(open_memory(requests="1000"))
    for source in ("here", "paper"):
        assert bars_of(chart, source) == pytest.approx(dict.fromkeys(("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "vLLM"), 100.0), abs=0.11)
    token_states = {(system, who): x for system, who, x in zip(*chart["data"][0]["y"], chart["data"][0]["x"], strict=True)}
    assert chart["data"][0]["name"] == "token states"
    # The paper's order of the four systems, and that paging wastes less than 4 % on its requests (section 1).
    ours = [token_states[system, "here"] for system in ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "vLLM")]
    assert ours == sorted(ours)
    assert ours[3] > 96
    assert token_states["Orca (Max)", "paper"] == 20.4


@pytest.mark.parametrize("name", workload_names())
def test_every_workload_says_where_it_is_from(name: str) -> None:
    app = open_memory(workload=name, requests="100")
    assert not app.error
    assert "Source:" in shown(app)
    assert len(charts(app)) == 1


def test_requests_longer_than_the_model_are_counted_and_said() -> None:
    app = open_memory(workload="mooncake-conversation", requests="200")
    assert "longer than 2,048 tokens" in shown(app)
    taken = open_memory(workload="mooncake-conversation", requests="200", longest="131072", slots="1048576")
    assert "longer than" not in shown(taken)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("slots", "12", "from 512 to"),
        ("slots", "many", "slots=many"),
        ("block", "17", "1, 2, 4, 8, 16"),
        ("requests", "-5", "100, 200"),
        ("longest", "1" * 30, "2048"),
        ("workload", "../../etc/passwd", "sharegpt-like"),
    ],
)
def test_what_the_address_cannot_mean_gives_one_sentence_and_the_default(name: str, value: str, says: str) -> None:
    app = open_memory(**{name: value})
    assert len(app.error) == 1
    assert says in app.error[0].value.replace("\\", "")
    assert "Traceback" not in app.error[0].value
    assert len(charts(app)) == 1
    assert app.query_params.get(name) in (None, [])


def test_settings_stand_in_the_address() -> None:
    app = open_memory(requests="200")
    app.selectbox(key="memory-block").set_value(64).run()
    app.number_input(key="memory-slots").set_value(9_728).run()
    address = {name: "".join(value) for name, value in app.query_params.items()}
    assert address == {"screen": "memory", "requests": "200", "block": "64", "slots": "9728"}


def test_the_smallest_memory_takes_the_largest_blocks() -> None:
    app = open_memory(requests="100", slots="512", longest="256", workload="alpaca-like", block="256")
    assert not app.error
    assert len(charts(app)) == 1


def test_a_file_becomes_the_requests_and_a_bad_one_changes_nothing_but_says_the_line() -> None:
    app = open_memory(requests="200")
    before = charts(app)
    app.file_uploader(key="memory-file").set_value(("mine.csv", GOOD, "text/csv")).run()
    assert not app.exception
    assert not app.error
    assert app.selectbox(key="memory-workload").value == "file"
    assert "mine.csv" in shown(app)
    good = charts(app)
    assert good != before
    app.file_uploader(key="memory-file").set_value(("bad.csv", b"prompt_len,output_len\n10,20\n30,-4\n", "text/csv")).run()
    assert not app.exception
    assert {error.value.replace("\\", "") for error in app.error} == {"“bad.csv”, line 3: output_len is -4, but a length cannot be negative."}
    assert charts(app) == good
    app.selectbox(key="memory-workload").set_value("alpaca-like").run()
    assert not app.error


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "“bad.csv”: the file is empty"),
        (b"\xef\xbb\xbf", "“bad.csv”: the file is empty"),
        (b"a,b\n1,2\n", "ContextTokens"),
        (b"prompt_len,output_len\n5\n", "line 2"),
        (b"prompt_len,output_len\n5,caf\xe9\n", "UTF-8"),
        (b'{"input_length": 4}\n', "output_length"),
        (b'{"input_length": 4, "output_length": 1}\n[', "line 2"),
        (b"\x1f\x8b\x08\x00\x00\x00" * 40, "UTF-8"),
    ],
)
def test_no_file_brings_the_screen_down(content: bytes, says: str) -> None:
    app = open_memory(requests="100")
    before = charts(app)
    app.file_uploader(key="memory-file").set_value(("bad.csv", content, "text/csv")).run()
    assert not app.exception
    assert says in app.error[0].value.replace("\\", "")
    assert charts(app) == before


def test_a_file_stays_with_the_browser_that_brought_it() -> None:
    app = open_memory(requests="100")
    app.file_uploader(key="memory-file").set_value(("secret.csv", GOOD, "text/csv")).run()
    assert "secret.csv" in shown(app)
    other = open_memory(requests="100")
    assert "file" not in other.selectbox(key="memory-workload").options
    assert "secret.csv" not in shown(other)


def test_kernels_are_measured_when_asked_for_and_only_once() -> None:
    app = open_memory(part="Block size", requests="100", workload="alpaca-like")
    assert "To be measured" in shown(app)
    app.button(key="memory-measure").click().run()
    assert not app.exception
    measured = charts(app)
    times = [trace["y"] for trace in measured[0]["data"] if trace.get("mode") == "lines+markers"]
    assert len(times) == 2
    app.run()
    assert "To be measured" not in shown(app)
    assert charts(app) == measured


def test_sharing_is_counted_when_asked_for() -> None:
    app = open_memory(part="Sharing", requests="100", workload="alpaca-like")
    names = [trace["name"] for trace in charts(app)[0]["data"]]
    assert "counted here, small model" not in names
    app.button(key="memory-share").click().run()
    assert not app.exception
    names = [trace["name"] for trace in charts(app)[0]["data"]]
    assert "counted here, small model" in names
