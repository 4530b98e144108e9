"""Test the protocol between nodes: valid texts are parsed as written, others are rejected."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.peers import MOST_HEAD_BYTES, PeerRequest, Question, protocol, read_head

KEYS = st.text("0123456789abcdef", min_size=40, max_size=40)


SPANS = st.tuples(st.integers(0, 10**12), st.integers(1, protocol.MOST_RANGE_BYTES)).map(
    lambda found: (found[0], found[0] + found[1])
)


A_KEY = "0123456789abcdef0123456789abcdef01234567"


@given(KEYS)
def test_a_key_is_what_its_path_asks_for(key: str) -> None:
    assert protocol.key_of(protocol.blob_path(key)) == key


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/v4/blobs/",
        f"/v4/blobs/{A_KEY}/",
        f"/v4/blobs/{A_KEY}\n",
        f"/v4/blobs/{A_KEY}?x=1",
        f"/v4/blobs/{A_KEY[:-1]}",
        f"/v4/blobs/{A_KEY}0",
        f"/v4/blobs/{A_KEY.upper()}",
        f"/v4/blobs/../{A_KEY}",
        f"/v4/blobs/%2e%2e/{A_KEY}",
        f"//v4/blobs/{A_KEY}",
        f"/v2/blobs/{A_KEY}",
        f"/v4/blobs/{A_KEY[:-1]}\0",
        f"/v4/blobs/{A_KEY[:-1]}\N{FULLWIDTH DIGIT ONE}",  # a digit of another alphabet
        f"http://there/v4/blobs/{A_KEY}",
        "/v4/blobs/" + "0" * 100_000,
        "/v4/held/catalogue.db",
    ],
)
def test_any_other_path_asks_for_nothing(path: str) -> None:
    assert protocol.key_of(path) is None


@given(SPANS)
def test_a_range_is_read_as_it_was_written(span: tuple[int, int]) -> None:
    assert protocol.ranges_of(protocol.ranges_text([span])) == [span]


@given(st.lists(st.tuples(st.integers(0, 10**12), st.integers(1, 10**6)), min_size=1, max_size=24))
def test_ranges_are_read_as_they_were_written(steps: list[tuple[int, int]]) -> None:
    spans, at = [], 0
    for gap, length in steps:
        spans.append((at + gap, at + gap + length))
        at = spans[-1][1]
    text = protocol.ranges_text(spans)
    assert len(text) < 1024
    assert protocol.ranges_of(text) == spans
    crcs = list(range(len(protocol.stretches(spans))))
    headers = {protocol.CRC_HEADER.lower(): protocol.crcs_text(crcs)}
    assert protocol.crcs_of(headers, len(crcs)) == crcs


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bytes=",
        "bytes=0-",
        "bytes=-5",
        "bytes=5-4",
        "bytes=3-4,0-1",
        "bytes=0-1,1-2",
        "bytes=0-1,",
        "bytes=0-1,,3-4",
        "bytes=0-1, 3-4",
        "bytes=" + ",".join(f"{2 * n}-{2 * n}" for n in range(protocol.MOST_RANGES + 1)),
        f"bytes=0-{2**25},{2**25 + 1}-{2**26}",
        "bytes= 0-1",
        "bytes=0-1 ",
        "bytes=0-1\n",
        "bytes=+0-1",
        "bytes=0x0-1",
        "bits=0-1",
        f"bytes=0-{protocol.MOST_RANGE_BYTES}",
        f"bytes=0-{10**18}",
        f"bytes=0-{'9' * 5000}",
        "bytes=\N{ARABIC-INDIC DIGIT ZERO}-\N{ARABIC-INDIC DIGIT ONE}",
    ],
)
def test_any_other_range_is_none(text: str) -> None:
    assert protocol.ranges_of(text) is None


@pytest.mark.parametrize(
    "text", ["", "0000000g,00000000", "00000000", "00000000;00000000", "000000000,0000000"]
)
def test_an_incomplete_head_is_rejected(text: str) -> None:
    assert protocol.crcs_of({protocol.CRC_HEADER.lower(): text}, 2) is None
    assert protocol.crcs_of({}, 2) is None


@given(st.lists(KEYS, max_size=50))
def test_cached_keys_are_listed_by_their_prefixes(keys: list[str]) -> None:
    body = protocol.held_keys(sorted(keys))
    assert len(body) == 8 * len(keys)
    found = protocol.held_prefixes(body)
    assert found is not None
    assert found.tolist() == sorted(map(protocol.key_prefix, keys))


def test_a_body_that_is_no_list_of_keys_is_none() -> None:
    assert protocol.held_prefixes(b"1234567") is None
    assert protocol.held_prefixes(np.array([2, 1], ">u8").tobytes()) is None


@given(st.integers(0, 2**33))
def test_a_date_has_a_resolution_of_a_second(now_s: int) -> None:
    assert protocol.date_of(protocol.date_text(now_s + 0.5)) == now_s


@pytest.mark.parametrize("text", ["", "yesterday", "x" * 10_000, "Mon, 99 Foo 2026 99:99:99 GMT"])
def test_an_invalid_date_is_ignored(text: str) -> None:
    assert protocol.date_of(text) is None


RIGHT = b"GET /v4/alive HTTP/1.1\r\nHost: x:1\r\nAuthorization: Penstock a.b.c\r\nRange: bytes=0-9"


def test_a_request_is_read() -> None:
    question = Question("GET", "/v4/alive", "bytes=0-9")
    right = PeerRequest(question, "Penstock a.b.c", [(0, 10)], keeps=True)
    assert read_head(RIGHT) == right
    assert read_head(RIGHT + b"\r\nConnection: close") == replace(right, keeps=False)
    spaced = RIGHT.replace(b": ", b": \t") + b" \t\r\nX: a b  "
    assert read_head(spaced) == right
    assert right.range_bytes == 10
    assert read_head(RIGHT + b",5-6") == replace(
        right, question=replace(question, range="bytes=0-9,5-6"), spans=None
    )
    lower = RIGHT.replace(b"Authorization", b"authorization").replace(b"Range", b"RANGE")
    assert read_head(lower) == read_head(RIGHT)


@given(st.binary(max_size=200), st.integers(0, len(RIGHT)), st.integers(0, 9))
def test_any_bytes_are_a_request_or_none(data: bytes, at: int, less: int) -> None:
    for head in (data, RIGHT[:at] + data + RIGHT[at + less :]):
        found = read_head(head)
        if found is not None:
            assert found.question.method.isupper()
            assert found.question.path.isascii()
            assert not set(found.question.path) & set(" \r\n\0")
            assert not set(found.token + found.question.range) & set("\r\n\0")


def test_a_long_head_is_none() -> None:
    long = RIGHT + b"".join(b"\r\nX-%d: %s" % (n, b"a" * 900) for n in range(5))
    assert len(long) > MOST_HEAD_BYTES
    assert read_head(long) is None
