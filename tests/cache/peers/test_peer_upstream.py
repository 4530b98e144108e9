"""Test peers as an upstream: always the right bytes, and the store for blobs that they lack."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from penstock.cache import PenstockWarning
from penstock.cache.fetch import Fetcher
from penstock.cache.peers import (
    Peer,
    PeerClient,
    PeerLimits,
    PeerSecret,
    PeerUpstream,
    PlannedReaders,
    peer_upstream,
    protocol,
)
from tests.cache.blobs.remotes import SIZES, content, joined, single
from tests.cache.blobs.upstream_contract import UpstreamTests, range_of
from tests.cache.peers.fake_peer import SECRET, FakePeer, fake_peer, head_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.cache.base import Answer
    from penstock.cache.blobs import BlobRange, Upstream
    from tests.servers.scripted import Asked, Talk
    from tests.stores import MemoryStore

LIMITS = PeerLimits(connect_s=0.3, silent_s=0.3, least_rate=10 * 2**20)


@dataclass
class Planned(PlannedReaders):
    """A plan: the owners of some blobs."""

    owners: dict[str, int] = field(default_factory=dict)
    later: set[str] = field(default_factory=set)  # blobs of a later epoch

    def owner(self, key: str) -> int | None:
        return self.owners.get(key)

    def is_needed(self, key: str) -> bool:
        return key not in self.later


class Asking:
    """An upstream over peers and a store, and what it counted."""

    def __init__(self, store: MemoryStore, *, secret: PeerSecret = SECRET) -> None:
        self.store, self.secret = store, secret
        self.fetcher = Fetcher(store)
        self.meter = self.fetcher.meter
        self.upstream = PeerUpstream(self.fetcher)
        self.directory = self.upstream.directory

    def use_peers(self, peers: Sequence[Peer], planned: Planned | None = None) -> None:
        self.upstream.use_peers(peers, PeerClient(self.secret, limits=LIMITS), planned=planned)

    def fetch(self, wanted: Sequence[BlobRange], *, urgent: bool = True) -> None:
        """Fetch ranges, and check each one's bytes."""
        found: dict[int, bytes] = {}

        def deliver(number: int, answer: Answer) -> None:
            assert number not in found
            found[number] = bytes(answer.data)

        self.upstream.fetch(wanted, deliver, urgent=urgent)
        for number, one in enumerate(wanted):
            assert found[number] == content(self.store, one.blob)[one.start : one.end]

    def close(self) -> None:
        self.upstream.close()
        self.fetcher.close()


@pytest.fixture
def asking(store: MemoryStore) -> Iterator[Asking]:
    made = Asking(store)
    yield made
    made.close()


@pytest.fixture
def peers() -> Iterator[list[FakePeer]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(fake_peer()) for _ in range(2)]


def hold(peer: FakePeer, store: MemoryStore, *numbers: int) -> None:
    for number in numbers:
        source = single(store, number)
        peer.blobs[source.key] = content(store, source)


class TestPeers(UpstreamTests):
    """One peer has two blobs; another wrongly claims to have a third."""

    @pytest.fixture
    def upstream(self, store: MemoryStore, asking: Asking, peers: list[FakePeer]) -> Upstream:
        hold(peers[0], store, 0, 4)
        peers[1].said = [single(store, 3).key]
        asking.use_peers([peer.peer(node) for node, peer in enumerate(peers)])
        return asking.upstream


class TestNobodyKnown(UpstreamTests):
    @pytest.fixture
    def upstream(self, asking: Asking) -> Upstream:
        return asking.upstream


def ranges(store: MemoryStore, number: int, *, step: int = 30_000) -> list[BlobRange]:
    size = SIZES[number]
    source = single(store, number)
    return [range_of(source, 0, at, min(at + step, size)) for at in range(0, size, step)]


def test_what_peers_hold_comes_from_them_alone(
    store: MemoryStore, asking: Asking, peers: list[FakePeer]
) -> None:
    hold(peers[0], store, 0)
    hold(peers[1], store, 4)
    asking.use_peers([peer.peer(node) for node, peer in enumerate(peers)])
    asking.fetch([*ranges(store, 0), *ranges(store, 4), *ranges(store, 5)])
    assert store.bytes_read == SIZES[5]
    traffic = asking.meter.snapshot()
    assert traffic.bytes_peers == SIZES[0] + SIZES[4]
    # The 16 small ranges of a blob are one request.
    assert traffic.peer_requests == peers[0].asked_for() + peers[1].asked_for() == 2
    assert peers[0].asked_for(protocol.HELD) == peers[1].asked_for(protocol.HELD) == 1


def test_a_peer_that_lacks_what_its_list_has_is_left_alone_for_a_moment(
    store: MemoryStore, asking: Asking, peers: list[FakePeer]
) -> None:
    peers[1].said = [single(store, 5).key]
    asking.use_peers([peer.peer(node) for node, peer in enumerate(peers)])
    asking.fetch(ranges(store, 5))
    assert peers[1].asked_for() == 1
    assert store.bytes_read == single(store, 5).size_bytes
    asking.fetch(ranges(store, 5))
    assert peers[1].asked_for() == 1
    assert not peers[0].asked_for()
    assert asking.meter.snapshot().peer_failed == 0


def test_a_clock_that_differs_by_an_hour_is_no_matter(
    store: MemoryStore, asking: Asking, peers: list[FakePeer]
) -> None:
    hold(peers[0], store, 0)
    hold(peers[1], store, 4)
    peers[0].ahead_s, peers[1].ahead_s = 3600.0, -3600.0
    asking.use_peers([peer.peer(node) for node, peer in enumerate(peers)])
    asking.fetch([*ranges(store, 0), *ranges(store, 4)])
    assert not store.bytes_read
    assert asking.meter.snapshot().peer_failed == 0


def test_another_jobs_token_gets_nothing_and_costs_little(
    store: MemoryStore, peers: list[FakePeer]
) -> None:
    asking = Asking(store, secret=PeerSecret(b"another secret of another job"))
    hold(peers[0], store, 0)
    asking.use_peers([peers[0].peer(0)])
    with pytest.warns(PenstockWarning, match="node 0 .*: it has another secret.*Copy one token"):
        asking.fetch(ranges(store, 0))
    asking.close()
    assert store.bytes_read == SIZES[0]
    assert asking.meter.snapshot().bytes_peers == 0
    assert asking.meter.snapshot().peer_failed >= 1


# -- peers that misbehave


@dataclass(frozen=True)
class Request:
    """A request for ranges of a blob, to be answered."""

    talk: Talk
    whole: bytes
    spans: list[tuple[int, int]]

    @property
    def head(self) -> dict[str, str]:
        """As it should be."""
        return head_of(self.whole, *self.spans)

    @property
    def body(self) -> bytes:
        """As it should be."""
        return b"".join(self.whole[start:end] for start, end in self.spans)

    @property
    def size(self) -> int:
        return len(self.body)


def drop(talk: Talk) -> None:
    talk._handler.close_connection = True


def short(to: Request) -> None:
    """The connection ends in the middle of the body."""
    to.talk.head(206, {**to.head, "Content-Length": str(to.size)})
    to.talk.write(to.body[: to.size // 2])
    drop(to.talk)


def shorter(to: Request) -> None:
    to.talk.answer(206, to.body[:-7], to.head)


def longer(to: Request) -> None:
    to.talk.answer(206, to.body + b"more", to.head)


def endless(to: Request) -> None:
    to.talk.endless(206, to.head)


def elsewhere(to: Request) -> None:
    """The last range is read from a wrong offset."""
    *others, (start, end) = to.spans
    aside = 1 if end < len(to.whole) else -1
    wrong = Request(to.talk, to.whole, [*others, (start + aside, end + aside)])
    to.talk.answer(206, wrong.body, wrong.head)


def some_of_it(to: Request) -> None:
    """The last range is left out, or its end."""
    *others, (start, end) = to.spans
    fewer = Request(to.talk, to.whole, others or [(start, end - 1)])
    to.talk.answer(206, fewer.body, fewer.head)


def all_of_it(to: Request) -> None:
    to.talk.answer(200, to.whole, head_of(to.whole, (0, len(to.whole))))


def flipped(to: Request) -> None:
    body = bytearray(to.body)
    body[len(body) // 2] ^= 1
    to.talk.answer(206, bytes(body), to.head)


def of_another_size(to: Request) -> None:
    more = {**to.head, "Content-Range": protocol.content_range(to.spans, 2**40)}
    to.talk.answer(206, to.body, more)


def without_checksum(to: Request) -> None:
    head = to.head
    del head[protocol.CRC_HEADER]
    to.talk.answer(206, to.body, head)


def redirect(to: Request) -> None:
    to.talk.redirect("http://169.254.169.254/latest/meta-data")


def refuse(to: Request) -> None:
    to.talk.answer(401)


def broken(to: Request) -> None:
    to.talk.answer(500, b"no")


def garbage(to: Request) -> None:
    to.talk.write(b"\x00\xff not HTTP at all\r\n\r\n" * 10)
    drop(to.talk)


def endless_head(to: Request) -> None:
    to.talk.write(b"HTTP/1.1 206 Partial\r\n")
    while not to.talk.closing.is_set() and to.talk.write(b"A: " + b"a" * 8000 + b"\r\n"):
        pass
    drop(to.talk)


def stall(to: Request) -> None:
    """Nothing of an answer comes."""
    to.talk.closing.wait(20)
    drop(to.talk)


def stall_in_body(to: Request) -> None:
    to.talk.head(206, {**to.head, "Content-Length": str(to.size)})
    to.talk.write(to.body[:100])
    to.talk.closing.wait(20)
    drop(to.talk)


def drip(to: Request) -> None:
    """Never silent for long, and never done."""
    to.talk.head(206, {**to.head, "Content-Length": str(to.size)})
    for at in range(to.size):
        if to.talk.closing.wait(0.05) or not to.talk.write(to.body[at : at + 1]):
            break
    drop(to.talk)


FAULTS = [
    short,
    shorter,
    longer,
    endless,
    elsewhere,
    some_of_it,
    all_of_it,
    flipped,
    of_another_size,
    without_checksum,
    redirect,
    refuse,
    broken,
    garbage,
    endless_head,
    stall,
    stall_in_body,
    drip,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_peer_that_misbehaves_costs_requests_and_never_a_byte(
    store: MemoryStore, asking: Asking, peers: list[FakePeer], fault: Callable[[Request], None]
) -> None:
    hold(peers[0], store, 0, 4)
    hold(peers[1], store, 4)

    def act(talk: Talk, asked: Asked) -> bool:
        key = protocol.key_of(asked.target)
        spans = protocol.ranges_of(asked.headers.get("range", ""))
        if key is None or spans is None:
            return False
        fault(Request(talk, peers[0].blobs[key], spans))
        return True

    peers[0].act = act
    asking.use_peers([peer.peer(node) for node, peer in enumerate(peers)])
    asking.fetch([*ranges(store, 0), *ranges(store, 4)])
    assert store.bytes_read >= SIZES[0]
    traffic = asking.meter.snapshot()
    assert traffic.peer_failed >= 1
    assert traffic.bytes_peers <= SIZES[4]
    before = peers[0].asked_for()
    asking.fetch([*ranges(store, 0), *ranges(store, 4)])  # it is left alone for a while
    assert peers[0].asked_for() == before
    assert asking.meter.snapshot().bytes_peers >= SIZES[4]  # of the other one


def test_peers_that_are_gone_or_never_were_cost_little(
    store: MemoryStore, asking: Asking, peers: list[FakePeer]
) -> None:
    hold(peers[0], store, 0)
    gone = [Peer(1, "127.0.0.1:9"), Peer(2, "localhost.invalid:80"), Peer(3, "no address")]
    asking.use_peers([peers[0].peer(0), *gone])
    with pytest.warns(PenstockWarning) as report:
        asking.fetch([*ranges(store, 0), *ranges(store, 4)])
    said = [str(one.message) for one in report]
    for number, words in ((1, "nothing listens"), (2, "can't be resolved"), (3, "no address")):
        assert any(f"node {number} " in text and words in text for text in said), said
    assert store.bytes_read == SIZES[4]


def test_lists_that_are_none_are_no_lists(
    store: MemoryStore, asking: Asking, peers: list[FakePeer]
) -> None:
    hold(peers[0], store, 0)

    def act(talk: Talk, asked: Asked) -> bool:
        if asked.target != protocol.HELD:
            return False
        talk.answer(200, b"12345")
        return True

    peers[0].act = act
    asking.use_peers([peers[0].peer(0)])
    with pytest.warns(PenstockWarning, match="Another program has that port"):
        asking.fetch(ranges(store, 0))
    assert store.bytes_read == SIZES[0]
    assert not peers[0].asked_for()


def test_a_blob_whose_bytes_were_wrong_comes_from_the_store(
    store: MemoryStore, asking: Asking, peers: list[FakePeer]
) -> None:
    hold(peers[0], store, 0, 4)
    hold(peers[1], store, 0, 4)
    asking.use_peers([peer.peer(node) for node, peer in enumerate(peers)])
    asking.fetch(ranges(store, 0))
    asking.upstream.mark_wrong(single(store, 0).key)
    asking.fetch(ranges(store, 0))
    assert store.bytes_read == SIZES[0]
    asking.fetch(ranges(store, 4))  # who gave it is left alone, the other isn't
    assert store.bytes_read == SIZES[0]


def test_ranges_of_many_objects_come_too(
    store: MemoryStore, asking: Asking, peers: list[FakePeer]
) -> None:
    whole = joined(store)
    peers[0].blobs[whole.key] = content(store, whole)
    asking.use_peers([peers[0].peer(0)])
    asking.fetch([range_of(whole, i, 0, size) for i, size in enumerate(SIZES)], urgent=False)
    assert not store.bytes_read


def test_a_fill_is_left_to_the_node_that_fetches_for_all(
    store: MemoryStore, asking: Asking, peers: list[FakePeer]
) -> None:
    mine, others = single(store, 0).key, single(store, 4).key
    assert not asking.upstream.is_left_to_others(others)
    hold(peers[1], store, 0)
    owned = {others: 1, single(store, 3).key: 7, mine: 1}
    asking.use_peers([peer.peer(node) for node, peer in enumerate(peers)], Planned(owned))
    assert asking.upstream.is_left_to_others(others)
    assert not asking.upstream.is_left_to_others(single(store, 3).key)  # node 7 is unknown
    assert not asking.upstream.is_left_to_others(single(store, 5).key)
    assert not asking.upstream.is_left_to_others(mine)  # it is there already
    peers[1].server.asked.clear()
    asking.directory.failed(peers[1].peer(1), time.monotonic(), reason="gone")
    assert not asking.upstream.is_left_to_others(others)


def test_what_another_node_reads_now_and_this_one_later_is_left_to_it_for_long(
    store: MemoryStore, asking: Asking, peers: list[FakePeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, later = single(store, 4).key, single(store, 3).key
    planned = Planned({now: 1, later: 1}, {later})
    asking.use_peers([peer.peer(node) for node, peer in enumerate(peers)], planned)
    upstream = asking.upstream
    assert upstream.is_left_to_others(now)
    assert upstream.is_left_to_others(later)
    monkeypatch.setattr(peer_upstream, "_LEFT_S", 0.0)
    assert not upstream.is_left_to_others(now)
    assert upstream.is_left_to_others(later)
    planned.owners.clear()  # the next epoch
    assert not upstream.is_left_to_others(later)


def test_fills_from_peers_take_connections_of_theirs_alone(
    store: MemoryStore, asking: Asking, peers: list[FakePeer]
) -> None:
    near, far = single(store, 0).key, single(store, 3).key
    hold(peers[0], store, 0)
    asking.use_peers([peer.peer(node) for node, peer in enumerate(peers)])
    upstream = asking.upstream
    asking.fetch(ranges(store, 0)[:1])
    assert upstream.is_near(near)
    assert not upstream.is_near(far)
    asking.fetch(ranges(store, 3)[:1])
    upstream.limit_fills(lambda *_: 0)  # batches are waiting: one fill from peers continues
    with upstream.reserve_fills(far, 9) as room, upstream.reserve_fills(near, 9) as beside:
        assert (room, beside) == (0, 1)
    upstream.limit_fills(lambda *_: 3)
    with upstream.reserve_fills(far, 9) as room, upstream.reserve_fills(near, 9) as beside:
        assert (room, beside) == (3, 3)
    upstream.mark_wrong(near)
    assert not upstream.is_near(near)
    asking.directory.failed(peers[0].peer(0), time.monotonic(), reason="gone")
    assert not upstream.is_near(near)


def test_peers_that_are_not_even_asked_in_time_cost_no_call(
    store: MemoryStore, asking: Asking, peers: list[FakePeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other calls occupy all connections to peers."""
    hold(peers[0], store, 0)
    policy = replace(peer_upstream._POLICY, retry_timeout_s=0.01)
    monkeypatch.setattr(peer_upstream, "_POLICY", policy)
    asking.use_peers([peers[0].peer(0)])
    asking.fetch(ranges(store, 5))  # its list is received
    asking.upstream._peers._scheduler.budget.in_flight = policy.max_connections
    asking.fetch([*ranges(store, 0), *ranges(store, 5)])
    assert asking.meter.snapshot().bytes_peers == 0
