"""A request is read exactly, or it is none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.peers import MOST_HEAD_BYTES, PeerRequest, Question, read_head

RIGHT = b"GET /v2/alive HTTP/1.1\r\nHost: x:1\r\nAuthorization: Penstock a.b.c\r\nRange: bytes=0-9"


def test_a_request_is_read() -> None:
    question = Question("GET", "/v2/alive", "bytes=0-9")
    assert read_head(RIGHT) == PeerRequest(question, "Penstock a.b.c", keeps=True)
    assert read_head(RIGHT + b"\r\nConnection: close") == PeerRequest(
        question, "Penstock a.b.c", keeps=False
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
