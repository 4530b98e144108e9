"""Test fills from a peer: bodies are received completely and written correctly to the cache."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ClosedError
from penstock.cache.base import Answer, BlobSpans, ObjectRange, RequestError
from penstock.cache.blobs import CachedBlob, Remote
from penstock.cache.disk import BLOCK_BYTES, DiskCache, crcs_of
from penstock.cache.fetch import Fetcher
from penstock.cache.peers import Peer, PeerClient, PeerUpstream, peer_ranges, protocol
from penstock.cache.stores import Connection, Timeouts, request_origin
from tests.cache.blobs.remotes import single
from tests.cache.blobs.upstream_contract import range_of
from tests.cache.peers.fake_peer import GROUP, SECRET, fake_peer, head_of
from tests.cache.peers.serving import serving
from tests.properties import examples
from tests.stores import MemoryStore
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from penstock.cache.blobs import BlobRange
    from tests.servers.scripted import Asked, Talk


SIZE = 3 * BLOCK_BYTES + 4321


DATA = np.random.default_rng(3).bytes(SIZE)


@contextlib.contextmanager
def remote_of(store: MemoryStore, folder: Path, peer: Peer) -> Iterator[Remote]:
    """Return a node with an empty cache and one peer."""
    fetcher, cache = Fetcher(store), DiskCache(folder, max_bytes="1GiB")
    upstream = PeerUpstream(fetcher)
    upstream.use_peers([peer], PeerClient(SECRET))
    remote = Remote(fetcher, cache, group=GROUP, label="x", upstream=upstream)
    yield remote
    remote.close()
    cache.close()


def check(remote: Remote, store: MemoryStore) -> None:
    source = single(store, 0)
    blob = remote.open(source)
    assert isinstance(blob, CachedBlob)
    assert bytes(blob.data) == DATA
    assert remote.cache is not None
    row = remote.cache.use(lambda folder: folder.catalogue.blob(source.key))
    assert row is not None
    assert row.crcs == crcs_of(memoryview(DATA))


def test_what_a_peer_has_is_filled_from_there(tmp_path: Path) -> None:
    store = MemoryStore({"o0": DATA})
    source = single(store, 0)
    with serving(tmp_path / "theirs", secret=SECRET) as served:
        served.cache.use(
            lambda folder: folder.put(source, memoryview(DATA), group=GROUP, kept=False)
        )
        peer = Peer(1, served.server.address)
        with remote_of(store, tmp_path / "mine", peer) as remote:
            assert remote.fill(single(store, 0)) == SIZE
            check(remote, store)
            assert not store.reads


def test_small_ranges_of_a_batch_are_kept_too(tmp_path: Path) -> None:
    store = MemoryStore({"o0": DATA})
    source = single(store, 0)
    starts = [5, 60_000, BLOCK_BYTES - 50_000, 2 * BLOCK_BYTES, SIZE - 7]
    ends = [start + size for start, size in zip(starts, [1, 9000, 100_000, 50, 7], strict=True)]
    with fake_peer({source.key: DATA}) as fake:
        with remote_of(store, tmp_path / "mine", fake.peer(1)) as remote:
            want = BlobSpans(blob=remote.open(source), starts=starts, ends=ends)
            ((*found,),) = remote.load([want])
            assert [bytes(one) for one in found] == [
                DATA[start:end] for start, end in zip(starts, ends, strict=True)
            ]
        assert fake.asked_for() == 1
    assert not store.reads


def second_block_wrong(talk: Talk, asked: Asked) -> bool:
    """The first block is a different one with a valid checksum; the checksum of the second is
    wrong."""
    spans = protocol.ranges_of(asked.headers.get("range", ""))
    if spans is None:
        return False
    other = bytes(BLOCK_BYTES) + DATA[BLOCK_BYTES:]
    (start, end) = spans[0]
    body = bytearray(other[start:end])
    body[BLOCK_BYTES + 7 :] = bytes(len(body) - BLOCK_BYTES - 7)
    talk.answer(206, bytes(body), head_of(other, (start, end)))
    return True


def test_what_a_peer_that_breaks_off_gave_counts_for_nothing(tmp_path: Path) -> None:
    store = MemoryStore({"o0": DATA})
    with fake_peer({single(store, 0).key: DATA}) as fake:
        fake.act = second_block_wrong
        with remote_of(store, tmp_path / "mine", fake.peer(1)) as remote:
            fetched = 0
            while not remote.is_whole(single(store, 0)):
                fetched += remote.fill(single(store, 0))
            assert fetched == SIZE
            check(remote, store)
        assert fake.asked_for() == 1
        assert store.bytes_read == SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept(ObjectRange):
    """A range whose bytes are kept as they arrive, at the moments that a test chooses."""

    act: Callable[[Callable[[], AbstractContextManager[None]]], None]

    def read(self, store: Any, delivering: Callable[[], AbstractContextManager[None]]) -> Answer:
        del store
        self.act(delivering)
        return Answer(data=b"", version="", object_bytes=0)


def test_nothing_is_kept_behind_the_end_of_a_call() -> None:
    kept, refused = list[int](), list[Exception]()
    begun, ended, over = threading.Event(), threading.Event(), threading.Event()

    def act(delivering: Callable[[], AbstractContextManager[None]]) -> None:
        with delivering():
            kept.append(1)
        begun.set()
        assert ended.wait(PATIENCE_S)
        try:
            with delivering():
                kept.append(2)
        except ClosedError as error:
            refused.append(error)
        over.set()

    fetcher = Fetcher(MemoryStore({}))
    wanted = Kept(path="x", start=0, end=1, version=None, act=act)
    with fetcher.fetching([wanted], lambda *_: None):
        assert begun.wait(PATIENCE_S)
    ended.set()
    assert over.wait(PATIENCE_S)
    assert (kept, len(refused)) == ([1], 1)
    fetcher.close()


def test_a_call_ends_after_what_is_being_kept_and_raises_its_error() -> None:
    begun, may_go_on, kept = threading.Event(), threading.Event(), list[int]()

    def act(delivering: Callable[[], AbstractContextManager[None]]) -> None:
        with delivering():
            begun.set()
            assert may_go_on.wait(PATIENCE_S)
            kept.append(1)
        raise ZeroDivisionError

    fetcher = Fetcher(MemoryStore({}))
    wanted = Kept(path="x", start=0, end=1, version=None, act=act)
    with fetcher.fetching([wanted], lambda *_: None):
        assert begun.wait(PATIENCE_S)
        threading.Timer(0.05, may_go_on.set).start()
    assert kept == [1]
    with pytest.raises(ZeroDivisionError), fetcher.fetching([wanted], lambda *_: None) as finish:
        finish()
    fetcher.close()


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, SIZE - 1), st.integers(1, SIZE)), max_size=80
    )
)
def test_each_range_is_asked_for_once_and_requests_stay_small(
    wanted: list[tuple[int, int, int]],
) -> None:
    store = MemoryStore({f"o{n}": DATA for n in range(3)})
    ranges: list[BlobRange] = [
        range_of(single(store, n), 0, start, min(SIZE, start + size // (1 + start % 97)) + 1)
        for n, start, size in wanted
    ]
    requests = peer_ranges(ranges, range(len(ranges)), lambda *_: None)
    assert sorted(n for one in requests for n in one.numbers) == list(range(len(ranges)))
    for one in requests:
        spans = [(ranges[n].start, ranges[n].end) for n in one.numbers]
        assert list(one.ranges) == [ranges[n] for n in one.numbers]
        assert len({ranges[n].blob.key for n in one.numbers}) == 1
        assert protocol.ranges_of(protocol.ranges_text(spans)) == spans
        assert len(spans) == 1 or one.end - one.start <= 2**22


BODY = memoryview(np.random.default_rng(5).bytes(700_000))


@contextlib.contextmanager
def connected(*, silent_s: float = PATIENCE_S):
    """A connection to a peer, and the socket of that peer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        origin = request_origin(f"http://{host}:{port}")
        sock = socket.create_connection((host, port))
        theirs, _ = listener.accept()
    limits = Timeouts(connect_s=1.0, read_s=silent_s, whole_s=PATIENCE_S)
    mine = Connection(sock, origin, is_public=False, timeouts=limits)
    mine.watch()
    with theirs, contextlib.closing(mine):
        yield mine, theirs


SIZES = st.sampled_from([1, 100, 2**16, 2**18 - 1, 2**18, 2**18 + 1, 400_000])


@examples(25)
@given(st.lists(SIZES, max_size=4), st.lists(SIZES, max_size=4))
def test_all_of_it_comes(sent: list[int], read: list[int]) -> None:
    with connected() as (mine, theirs):

        def send() -> None:
            at = 0
            for size in (*sent, len(BODY)):
                theirs.sendall(BODY[at : at + size])
                at += size

        sender = threading.Thread(target=send)
        sender.start()
        there, deadline_s = 0, time.monotonic() + PATIENCE_S
        for size in (*read, len(BODY)):
            room = memoryview(bytearray(min(size, len(BODY) - there)))
            following = len(BODY) - there - len(room)
            assert mine.receive_all(room, deadline_s, following=following) == len(room)
            assert room == BODY[there : there + len(room)]
            there += len(room)
        sender.join()
        theirs.sendall(b"next")
        head = memoryview(bytearray(100))
        assert mine.receive(head, deadline_s) == 4


def test_what_breaks_off_or_falls_silent_is_noticed() -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    with connected() as (mine, theirs):
        theirs.sendall(BODY[:300_000])
        theirs.shutdown(socket.SHUT_WR)
        assert mine.receive_all(memoryview(bytearray(2**20)), deadline_s) == 300_000
    with connected(silent_s=0.05) as (mine, theirs):
        theirs.sendall(BODY[:300_000])
        with pytest.raises(RequestError, match="nothing came"):
            mine.receive_all(memoryview(bytearray(2**20)), deadline_s)
        with pytest.raises(RequestError, match="no complete answer"):
            mine.receive_all(memoryview(bytearray(2**20)), 0.0)
