"""Test that the server sends exactly the cached bytes, with checksums, to authorised clients."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from crc32c import crc32c

from penstock.cache.disk import BLOCK_BYTES
from penstock.cache.peers import PeerSecret, Question, authorize, listen, protocol, server_time
from tests.cache.peers.serving import (
    GROUP,
    Answer,
    Served,
    content,
    key_of,
    put,
    read_answer,
    source,
)

if TYPE_CHECKING:
    from penstock.cache.disk import CacheFolder

SIZE = 5 * BLOCK_BYTES + 4321


@pytest.fixture(scope="module")
def served(served: Served) -> Served:
    """The server, whose cache contains a blob."""
    put(served.cache, "whole", SIZE)
    return served


@pytest.mark.parametrize(
    "span",
    [
        (0, SIZE),
        (0, 1),
        (SIZE - 1, SIZE),
        (17, 100_017),
        (BLOCK_BYTES, 3 * BLOCK_BYTES),
        (BLOCK_BYTES - 1, 4 * BLOCK_BYTES + 7),
        (3 * BLOCK_BYTES, SIZE),
        (5 * BLOCK_BYTES, SIZE),
    ],
)
def test_a_range_of_a_whole_blob_comes_with_its_checksum(
    served: Served, span: tuple[int, int]
) -> None:
    answer = served.ask(protocol.blob_path(key_of("whole")), span)
    assert answer.status == 206
    assert answer.body == content("whole", SIZE)[slice(*span)]
    check_head(answer, "whole", SIZE, [span])


def check_head(answer: Answer, name: str, size: int, spans: list[protocol.Span]) -> None:
    assert answer.headers["content-range"] == protocol.content_range(spans, size)
    wanted = protocol.stretches(spans)
    data = content(name, size)
    crcs = protocol.crcs_of(answer.headers, len(wanted))
    assert crcs == [crc32c(data[start:end]) for start, end in wanted]


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 1), (1, 2), (100, 200)],
        [(n * 150_000, n * 150_000 + 100_000) for n in range(24)],
        [(17, BLOCK_BYTES + 3), (3 * BLOCK_BYTES, SIZE)],
    ],
)
def test_ranges_of_a_blob_come_one_behind_another(
    served: Served, spans: list[protocol.Span]
) -> None:
    answer = served.ask(protocol.blob_path(key_of("whole")), spans)
    assert answer.status == 206
    assert answer.body == b"".join(content("whole", SIZE)[slice(*span)] for span in spans)
    check_head(answer, "whole", SIZE, spans)
    beyond = served.ask(protocol.blob_path(key_of("whole")), [(0, 10), (SIZE - 5, SIZE + 1)])
    assert (beyond.status, beyond.body) == (404, b"")


@pytest.mark.parametrize("spans", [[(17, 100_017)], [(0, 10), (2_000_000, 2_100_000)], [(0, SIZE)]])
def test_what_isnt_in_the_page_cache_is_sent(served: Served, spans: list[protocol.Span]) -> None:
    path = served.cache.use(lambda folder: folder.layout.blob(key_of("whole")))
    with open(path, "rb") as file:
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    answer = served.ask(protocol.blob_path(key_of("whole")), spans)
    assert answer.body == b"".join(content("whole", SIZE)[slice(*span)] for span in spans)
    check_head(answer, "whole", SIZE, spans)


def test_what_isnt_held_or_isnt_there_is_404(served: Served) -> None:
    assert served.ask(protocol.blob_path("0" * 40), (0, 10)).status == 404
    answer = served.ask(protocol.blob_path(key_of("whole")), (SIZE - 1, SIZE + 1))
    assert (answer.status, answer.body) == (404, b"")


def test_a_blob_that_is_being_filled_isnt_served(served: Served) -> None:
    blob, data = source("half", SIZE), content("half", SIZE)
    begun = served.cache.use(lambda folder: folder.begin(blob, group=GROUP, pinned=False))
    fill, _ = begun
    fill.write((0, 2), memoryview(data)[: 2 * 4096])
    answer = served.ask(protocol.blob_path(blob.key), (0, 100))
    assert (answer.status, answer.body) == (404, b"")
    fill.close()


def test_the_keys_of_all_whole_blobs_are_listed(served: Served) -> None:
    for n in range(3):
        put(served.cache, f"of-b-{n}", 100 + n, group="b" * 32)
    found = protocol.held_prefixes(served.ask(protocol.HELD).body)
    assert found is not None
    folder = Path(served.cache.path) / "blobs"
    assert found.tolist() == sorted(protocol.key_prefix(path.name) for path in folder.iterdir())
    assert {protocol.key_prefix(key_of(f"of-b-{n}")) for n in range(3)} <= set(found.tolist())


def test_requests_follow_one_another_on_a_connection(served: Served) -> None:
    data, path = content("whole", SIZE), protocol.blob_path(key_of("whole"))
    spans = [(n * 1000, n * 1000 + 50_000 * n + 1) for n in range(20)]
    with contextlib.closing(served.dial()) as sock:
        for span in spans:
            sock.sendall(served.head(path, span))
            answer, left = read_answer(sock)
            assert answer.body == data[slice(*span)]
            assert not left
        # No node of the job sends this, but it is HTTP.
        sock.sendall(b"".join(served.head(path, span) for span in spans[:8]))
        left = b""
        for span in spans[:8]:
            answer, left = read_answer(sock, left)
            assert answer.body == data[slice(*span)]


def test_an_expired_token_gets_the_time_and_one_of_that_time_is_accepted(served: Served) -> None:
    """A client whose clock is an hour off learns the server's."""
    path, late_s = protocol.blob_path(key_of("whole")), time.time() - 3600
    for now_s in (late_s, late_s + 7200):
        token = authorize(served.secret, Question("GET", path, "bytes=0-9"), now_s=now_s)
        answer = served.ask(path, (0, 10), now_s=now_s)
        assert (answer.status, answer.body) == (401, b"")
        found = server_time(served.secret, token, answer.headers)
        assert found is not None
        assert abs(found - time.time()) < 60
        assert served.ask(path, (0, 10), now_s=found).status == 206


def test_who_isnt_of_the_job_learns_nothing(served: Served) -> None:
    path = protocol.blob_path(key_of("whole"))
    others = served.ask(path, (0, 10), secret=PeerSecret.draw())
    assert (others.status, others.body) == (401, b"")
    assert set(others.headers) == {"date", "content-length", "connection"}
    with contextlib.closing(served.dial()) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nRange: bytes=0-9\r\n\r\n".encode())
        assert read_answer(sock)[0].headers.keys() == others.headers.keys()
        assert sock.recv(100) == b""


def test_a_token_for_another_question_is_none(served: Served) -> None:
    path = protocol.blob_path(key_of("whole"))
    for changed in (
        served.head(path, (0, 10)).replace(b"0-9", b"0-99"),
        served.head(protocol.ALIVE).replace(b"/v4/alive", path.encode()),
        served.head(path, (0, 10)).replace(path.encode(), b"/v4/alive"),
    ):
        with contextlib.closing(served.dial()) as sock:
            sock.sendall(changed)
            assert read_answer(sock)[0].status == 401


def test_what_is_being_sent_is_held_against_the_evictor(served: Served) -> None:
    data = put(served.cache, "held", 40 * BLOCK_BYTES)
    key = key_of("held")
    with contextlib.closing(served.dial()) as sock:
        sock.sendall(served.head(protocol.blob_path(key), (0, len(data))))
        first = sock.recv(1)  # it is under way, and more than a socket holds is left
        inode = served.cache.use(lambda folder: folder.layout.blobs.stat(key).st_ino)

        def is_free(folder: CacheFolder) -> bool:
            locks = folder.layout.locks("readers")
            try:
                return bool(locks.lock(inode))
            finally:
                locks.close()

        assert not served.cache.use(is_free)
        assert read_answer(sock, first)[0].body == data
        assert served.ask(protocol.ALIVE).status == 200
    deadline_s = time.monotonic() + 20
    while not served.cache.use(is_free):
        assert time.monotonic() < deadline_s


def test_a_blob_that_was_dropped_isnt_served(served: Served) -> None:
    put(served.cache, "dropped", 1000)
    path = protocol.blob_path(key_of("dropped"))
    assert served.ask(path, (0, 1000)).status == 206
    served.cache.use(lambda folder: folder.space.drop(key_of("dropped"), inode=None))
    assert served.ask(path, (0, 1000)).status == 404


def test_a_blob_that_the_disk_changed_carries_the_checksum_of_what_came(served: Served) -> None:
    put(served.cache, "rotten", 2 * BLOCK_BYTES)
    with open(served.cache.use(lambda folder: folder.layout.blob(key_of("rotten"))), "r+b") as file:
        file.seek(77)
        file.write(b"x" * 8)
    answer = served.ask(protocol.blob_path(key_of("rotten")), (0, 2 * BLOCK_BYTES))
    check_head(answer, "rotten", 2 * BLOCK_BYTES, [(0, 2 * BLOCK_BYTES)])
    assert answer.body != content("rotten", 2 * BLOCK_BYTES)


def test_it_listens_at_no_name_that_stands_for_every_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for place in (("0.0.0.0", 0), ("::", 0, 0, 0), ("::ffff:0.0.0.0", 0, 0, 0)):
        family = socket.AF_INET if len(place) == 2 else socket.AF_INET6
        found = [(family, socket.SOCK_STREAM, 6, "", place)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
        with pytest.raises(OSError, match="all networks of the node"):
            listen("everywhere.example", 0)
