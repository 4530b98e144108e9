"""Test the parts of the web client and of bucket stores without a server."""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import MemoryStore

from penstock.cache.base import ObjectInfo, RequestError
from penstock.cache.stores import (
    Connection,
    ConnectionPool,
    ObstoreStore,
    Proxies,
    StaleError,
    Timeouts,
    WebOrigin,
    bucket_failure,
    open_store,
    parse_head,
    request_failure,
    without_markers,
    xml_fields,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

ORIGIN = WebOrigin("http", "host.example", 80)
TIMEOUTS = Timeouts(connect_s=5.0, read_s=5.0, whole_s=5.0)
LATER_S = 1e12


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    connection = Connection(ours, ORIGIN, is_public=True, timeouts=TIMEOUTS)
    connection.watch()
    yield connection, theirs
    connection.close()
    theirs.close()


# -- connections


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nA: b\r\n\r\nrest", b"A" * 70_000, b""])
def test_a_head_is_read_to_its_end(pair: tuple[Connection, socket.socket], answer: bytes) -> None:
    connection, theirs = pair
    theirs.sendall(answer)
    theirs.shutdown(socket.SHUT_WR)
    if answer.startswith(b"HTTP"):
        status, headers, begin, end = connection.read_head(LATER_S)
        assert (status, headers) == (200, {"a": "b"})
        assert bytes(connection.buffer[begin:end]) == b"rest"
        return
    with pytest.raises(RequestError, match="has no end" if answer else "ended before"):
        connection.read_head(LATER_S)


def test_a_kept_connection_that_was_closed_is_stale(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    connection.rest()
    assert connection.is_fit(0.0)
    theirs.close()
    assert not connection.is_fit(0.0)
    with pytest.raises(StaleError):
        connection.read_head(LATER_S)


def test_an_aborted_connection_states_closed(pair: tuple[Connection, socket.socket]) -> None:
    connection, _ = pair
    connection.abort()
    with pytest.raises(RequestError, match="closed") as raised:
        connection.read_head(LATER_S)
    assert raised.value.kind == "refused"


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ("SSH-2.0-OpenSSH", "the answer isn't HTTP"),
        ("HTTP/1.1 20", "the answer isn't HTTP"),
        ("HTTP/1.1 200 OK\r\nno colon", "is broken"),
        ("HTTP/1.1 200 OK\r\nname : space", "is broken"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 1\r\ncontent-length: 2", "two lengths"),
    ],
)
def test_a_head_that_is_broken_is_tried_again(head: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as raised:
        parse_head(head)
    assert raised.value.kind == "transient"


@given(
    headers=st.dictionaries(
        st.text("abc-", min_size=1, max_size=5), st.text("xyz 1=,", max_size=9), max_size=4
    )
)
def test_headers_come_by_their_lower_case_names(headers: dict[str, str]) -> None:
    lines = [f"{name.upper()}:  {value} " for name, value in headers.items()]
    status, found = parse_head("\r\n".join(["HTTP/1.1 206 Partial Content", *lines]))
    assert status == 206
    assert found == {name: value.strip() for name, value in headers.items()}


def test_a_name_that_is_not_known_may_be_misspelt() -> None:
    error = socket.gaierror(-2, "Name or service not known")
    failure = request_failure(error, ORIGIN, read_timeout_s=5.0)
    assert failure.kind == "unreachable"
    assert "http://host.example:80" in str(failure)


# -- the pool


def no_pool() -> ConnectionPool:
    """Return a pool without connections."""
    return ConnectionPool(timeouts=TIMEOUTS, proxies=Proxies(), tls=ssl.create_default_context)


def test_a_pool_gives_what_was_put_back(pair: tuple[Connection, socket.socket]) -> None:
    connection, _ = pair
    pool = no_pool()
    assert pool.take(ORIGIN, only_public=False) is None
    pool.add(connection)
    assert pool.take(ORIGIN, only_public=False) is None  # in use
    pool.put_back(connection, keep=True)
    assert pool.take(WebOrigin("http", "host.example", 81), only_public=False) is None
    assert pool.take(ORIGIN, only_public=True) is connection
    connection.is_public = False
    pool.put_back(connection, keep=True)
    assert pool.take(ORIGIN, only_public=True) is None
    assert pool.take(ORIGIN, only_public=False) is connection


def test_a_pool_gives_nothing_that_has_unread_bytes(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    pool = no_pool()
    pool.add(connection)
    pool.put_back(connection, keep=True)
    theirs.sendall(b"unasked")
    assert pool.take(ORIGIN, only_public=False) is None
    assert connection.sock.fileno() == -1


def test_an_aborted_pool_ends_all_and_takes_no_more(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    pool = no_pool()
    pool.add(connection)
    pool.abort()
    assert theirs.recv(1) == b""
    with pytest.raises(RequestError, match="closed"):
        pool.take(ORIGIN, only_public=False)
    with pytest.raises(RequestError, match="closed"):
        pool.add(connection)
    pool.put_back(connection, keep=True)
    assert connection.sock.fileno() == -1


# -- what is learnt from answers


def test_a_proxy_is_chosen_by_scheme_and_host() -> None:
    proxies = Proxies(by_scheme={"http": "proxy.example:3128"}, excludes="inside.example")
    assert proxies.of(ORIGIN) == "http://proxy.example:3128"
    assert proxies.of(WebOrigin("https", "host.example", 443)) is None
    assert proxies.of(WebOrigin("http", "a.inside.example", 80)) is None
    every = Proxies(by_scheme={"all": "http://p:1"})
    assert every.of(WebOrigin("https", "host.example", 443)) == "http://p:1"


def test_a_buckets_answer_in_xml_is_understood() -> None:
    answer = "<Error><Code>NoSuchBucket</Code><Message>not\nhere</Message></Error>"
    assert xml_fields(answer) == {"Code": "NoSuchBucket", "Message": "not here"}
    assert xml_fields("<html><Message>hello</Message></html>") == {}
    kind, text, remedy = bucket_failure(f"Client error: {answer}", "b")
    assert (kind, text) == ("missing", "there is no bucket 'b' at this endpoint")
    assert remedy is not None
    assert bucket_failure("no XML", "b") == (None, "", None)


def test_markers_of_folders_are_no_objects() -> None:
    def info(path: str, size_bytes: int = 0) -> ObjectInfo:
        return ObjectInfo(path=path, size_bytes=size_bytes, version="")

    listed = [info("a"), info("a/b"), info("a/c", 5), info("d"), info("dd", 1)]
    kept = [each.path for each in without_markers(listed, "")]
    assert kept == ["a/b", "a/c", "d", "dd"]
    assert [*without_markers([info("folder")], "folder")] == []
    assert [*without_markers([], "")] == []


def test_a_marker_at_the_end_of_a_page_is_no_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cache.stores.obstore_store._PAGE", 2)
    options = {"anon": True, "region": "us-east-1"}
    store = open_store("s3://bucket", options)
    assert isinstance(store, ObstoreStore)
    memory = MemoryStore()
    for name, data in {"a": b"1", "b": b"", "b/x": b"2", "c": b"3", "d": b""}.items():
        memory.put(name, data)
    monkeypatch.setattr(store, "_store", memory)
    monkeypatch.setattr(store, "_retrying", memory)
    assert [info.path for info in store.walk()] == ["a", "b/x", "c", "d"]
    store.close()
