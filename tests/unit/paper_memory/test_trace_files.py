"""Traces from files: what is read, and the one sentence for everything that cannot be."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidInput
from engine.paper import trace_files
from engine.paper.trace_files import read_trace
from engine.paper.workload import Workload, WorkloadRequest

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n"
MOONCAKE = '{"timestamp": 500, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n\n{"timestamp": 3500, "input_length": 9, "output_length": 2}'


def test_azure() -> None:
    workload = read_trace(AZURE.encode(), "a.csv")
    assert [(r.prompt_len, r.output_len) for r in workload.requests] == [(374, 44), (396, 109)]
    assert workload.requests[0].arrival == 0
    assert workload.requests[1].arrival == pytest.approx(4.314579, abs=1e-5)
    assert (workload.arrival_unit, workload.source) == ("seconds", "a.csv (Azure LLM inference trace)")


def test_mooncake() -> None:
    workload = read_trace(MOONCAKE.encode(), "m.jsonl")
    assert workload.requests == (WorkloadRequest(0.0, 6758, 500, "R0"), WorkloadRequest(3.0, 9, 2, "R1"))


def test_plain_csv_without_arrivals_comes_at_once() -> None:
    """Columns in any order and case, others ignored, a byte order mark and empty lines allowed."""
    workload = read_trace('\ufeffname, Output_Len ,PROMPT_LEN\nx, 3 ,5\n,,\n"y, z",4,6\n'.encode(), "p.csv")
    assert workload.requests == (WorkloadRequest(0.0, 5, 3, "R0"), WorkloadRequest(0.0, 6, 4, "R1"))
    assert workload.arrival_unit == "iterations"


def test_arrivals_are_put_in_order() -> None:
    workload = read_trace(b"arrival,prompt_len,output_len\n9.5,1,1\n7,2,2\n1e1,3,3\n", "p.csv")
    assert workload.requests == (WorkloadRequest(0.0, 2, 2, "R1"), WorkloadRequest(2.5, 1, 1, "R0"), WorkloadRequest(3.0, 3, 3, "R2"))


def test_zones_of_time() -> None:
    workload = read_trace(b"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 01:00:00+01:00,1,1\n2024-05-10T00:00:02.5Z,1,1\n", "z.csv")
    assert [r.arrival for r in workload.requests] == [0.0, 2.5]


HEAD = "prompt_len,output_len\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "x: the file is empty"),
        (b" \n\n", "x: the file is empty"),
        (b"prompt_len,tokens\n1,2\n", "x:1: there is prompt_len, but output_len is missing"),
        (b"GeneratedTokens\n1\n", "x:1: there is generatedtokens, but contexttokens is missing"),
        (b"a;b\n1;2\n", "x:1: the names here are 'a;b', but the lengths must be called"),
        (HEAD.encode(), "x:1: there are column names, but no request follows"),
        ((HEAD + "5,5\n-3,5\n").encode(), "x:3: prompt_len is -3, but a length cannot be negative"),
        ((HEAD + "5,0\n").encode(), "x:2: output_len is 0, but a request has at least 1 token"),
        ((HEAD + "5,10000001\n").encode(), "x:2: output_len is 10000001, but more than 10,000,000 tokens"),
        ((HEAD + "5,many\n").encode(), "x:2: output_len is 'many', but it must be a whole number"),
        ((HEAD + "5,1.5\n").encode(), "x:2: output_len is '1.5', but it must be a whole number"),
        ((HEAD + "5,nan\n").encode(), "x:2: output_len is 'nan'"),
        ((HEAD + "5,٣\n").encode(), "x:2: output_len is '٣'"),
        ((HEAD + "5," + "9" * 5000 + "\n").encode(), r"x:2: output_len is 9{30}…, but more than 10,000,000 tokens are taken for a mistake"),
        ((HEAD + "5,-" + "9" * 5000 + "\n").encode(), r"x:2: output_len is -9{29}…, but a length cannot be negative"),
        ((HEAD + "5," + "0" * 40 + "\n").encode(), r"x:2: output_len is 0{30}…, but"),
        (b"\xef\xbb\xbf", "x: the file is empty"),
        (b"\xef\xbb\xbf\r\n", "x: the file is empty"),
        ((HEAD + "5\n").encode(), "x:2: this line has 1 of the 2 columns"),
        ((HEAD + "5,\n").encode(), "x:2: output_len is ''"),
        ((HEAD + '5,"6\n').encode() + b"7" * 200_000, "x:3: this line is no CSV"),
        (HEAD.encode() + b"5,6\n\xff\xfe,7\n", "x:3: byte 1 of this line is no UTF-8 text"),
        ("prompt_len,output_len\n5,6\n".encode("utf-16"), "x:1: byte 1 of this line is no UTF-8 text"),
        ("prompt_len,output_len\n5,6\n".encode("utf-16-le"), "x:1: this line has zero bytes"),
        (b"arrival,prompt_len,output_len\n1,5,6\n,5,6\n", "x:3: arrival is given for some requests only"),
        (b"arrival,prompt_len,output_len\n-1,5,6\n", "x:2: arrival is '-1', but it must be a number that is not negative"),
        (b"arrival,prompt_len,output_len\n2023-02-30 10:00:00,5,6\n", "x:2: arrival is '2023-02-30 10:00:00'"),
        (b"arrival,prompt_len,output_len\ninf,5,6\n", "x:2: arrival is 'inf'"),
        (b'{"input_length": 5, "output_length": 6}\n{"input_length": 5\n', "x:2: this line is no JSON object"),
        (b'{"input_length": 5, "output_length": 6}\n' + b"[" * 100_000, "x:2: this line is no JSON object"),
        (b'{"input_length": 5, "output_length": 6}\n[5, 6]\n', "x:2: this line is JSON, but no object"),
        (b'[{"input_length": 5, "output_length": 6}]', "x:1: this is a JSON list"),
        (b'{"input_length": 5}\n', "x:1: there is input_length, but output_length is missing"),
        (b'{"input_length": 5, "output_length": 6}\n{"input_length": 5}\n', "x:2: output_length is missing"),
        (b'{"input_length": 5, "output_length": true}\n', "x:1: output_length is 'True'"),
        (b'{"input_length": 5, "output_length": 6.0}\n', "x:1: output_length is '6.0'"),
        (b'{"input_length": 5, "output_length": ' + b"9" * 5000 + b"}\n", "x:1: "),
        (b'{"timestamp": NaN, "input_length": 5, "output_length": 6}\n', "x:1: timestamp is 'nan'"),
        (b'{"\\ud800\\n": 5}', r"x:1: the names here are '\\ud800\\n', but the lengths must be called"),
        (b"PK\x03\x04\x00\x00", "x:1: this line has zero bytes"),
    ],
)
def test_bad_files(data: bytes, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_trace(data, "x")
    assert re.match(message, str(refused.value)), str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 260


@settings(max_examples=300)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.text(alphabet='0123456789-.,;:"{}[]\n\r\t eE+prmt_lenou', max_size=120).map(lambda text: (HEAD + text).encode()),
        st.tuples(st.sampled_from([AZURE.encode(), MOONCAKE.encode()]), st.integers(0, 150), st.binary(max_size=3)).map(
            lambda cut: cut[0][: cut[1]] + cut[2] + cut[0][cut[1] + len(cut[2]) :]
        ),
        st.dictionaries(
            st.sampled_from(["input_length", "output_length", "timestamp", "x"]), st.recursive(st.integers() | st.floats() | st.text(), st.lists)
        ).map(lambda row: json.dumps(row).encode()),
    )
)
def test_whatever_is_in_a_file_it_is_read_or_refused_in_a_sentence(data: bytes) -> None:
    sentence = ""
    workload = Workload("none", "", ())
    try:
        workload = read_trace(data, "x")
    except InvalidInput as refused:
        sentence = str(refused)
    if sentence:
        assert re.fullmatch(r"x(:\d+)?: [^\n]+", sentence.encode().decode())
        return
    assert workload.requests
    assert all(1 <= length <= 10_000_000 for r in workload.requests for length in (r.prompt_len, r.output_len))
    assert [r.arrival for r in workload.requests] == sorted(r.arrival for r in workload.requests)


def test_a_file_of_200_mb_is_refused_before_it_is_read() -> None:
    line = b"1000,1000\n"
    data = HEAD.encode() + line * 20_000_000
    with pytest.raises(InvalidInput, match=r"^big.csv:4999999: the file has 200 MB, but at most 50 MB are read: cut it before line 4999999$"):
        read_trace(data, "big.csv")


def test_a_file_that_is_one_long_line_is_not_to_be_cut_before_line_1() -> None:
    with pytest.raises(InvalidInput, match=r"^big.csv:1: the file has 60 MB, but at most 50 MB are read: its first line alone is longer, so it is no trace$"):
        read_trace(bytes(60_000_000), "big.csv")


def test_millions_of_empty_lines_are_not_read_to_the_end() -> None:
    told: list[float] = []
    with pytest.raises(InvalidInput, match=r"^x:1000001: there are more than 1,000,000 lines: cut the file before this line, or its empty lines out$"):
        read_trace(HEAD.encode() + b"\n" * 40_000_000, "x", told.append)
    assert max(told) < 0.1


def test_too_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "MAX_REQUESTS", 2)
    with pytest.raises(InvalidInput, match=r"x:4: there are more than 2 requests"):
        read_trace((HEAD + "5,5\n" * 3).encode(), "x")


def test_progress_rises_to_one() -> None:
    told: list[float] = []
    read_trace((HEAD + "5,5\n" * 5000).encode(), "x", told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert 90 < len(told) <= 101
