"""The fetcher: right bytes or an error that names the URL, in bounded time and requests."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache.base.fetch_policy import (
    Connections,
    FetchPolicy,
    Health,
    RequestTimes,
    backoff_s,
    quantile,
)
from penstock.cache.base.store import Answer, ObjectInfo, RequestError
from penstock.cache.errors import ClosedError, ConfigError, FetchError, ObjectChangedError
from penstock.cache.fetch.fetcher import Fetcher
from penstock.cache.fetch.object_range import ObjectRange
from penstock.cache.stores.opening import open_store
from tests.servers import FAULTS, Faults, Server, serving
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SIZE = 64 * 1024
STEP = 1024
QUICK = FetchPolicy(
    retry_timeout_s=30.0,
    backoff_base_s=0.001,
    backoff_cap_s=0.01,
    read_timeout_s=0.3,
    connect_timeout_s=2.0,
    max_attempts=20,
)
OPTIONS = {"read_timeout": 0.3, "connect_timeout": 2.0, "retry_timeout": 30.0}


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "bucket" / "set"
    folder.mkdir(parents=True)
    for number in range(4):
        (folder / f"{number}.bin").write_bytes(content(number))
    with serving(tmp_path) as server:
        yield server


def make(server: Server, scheme: str, policy: FetchPolicy = QUICK) -> Fetcher:
    if scheme == "s3":
        store = open_store("s3://bucket/set", {**server.s3_options, **OPTIONS})
    else:
        store = open_store(f"{server.url}/bucket/set", OPTIONS)
    return Fetcher(store, policy=policy, jitter=random.Random(1))


def spans_of(fetcher: Fetcher, *, versioned: bool = True) -> list[ObjectRange]:
    """All of every object, in ranges of STEP bytes."""
    infos = [fetcher.info(f"{number}.bin") for number in range(4)]
    return [
        ObjectRange(
            path=info.path,
            start=start,
            end=start + STEP,
            version=info.version if versioned else None,
        )
        for info in infos
        if info is not None
        for start in range(0, SIZE, STEP)
    ]


def collect(fetcher: Fetcher, spans: list[ObjectRange], *, urgent: bool = True) -> list[bytes]:
    found: dict[int, bytes] = {}

    def deliver(number: int, answer: Answer) -> None:
        assert number not in found, "delivered twice"
        found[number] = bytes(answer.data)

    fetcher.fetch(spans, deliver, urgent=urgent)
    return [found[number] for number in range(len(spans))]


def check(spans: list[ObjectRange], found: list[bytes]) -> None:
    for span, data in zip(spans, found, strict=True):
        assert data == content(int(span.path[0]))[span.start : span.end]


class Scripted:
    """A store that does what a function says."""

    url = "test://store"
    scope = ""
    secrets = ()

    def __init__(self, act: Callable[[str, tuple[int, int] | None], Answer]) -> None:
        self.act = act
        self.calls: Counter[Any] = Counter()
        self.lock = threading.Lock()
        self.closed = 0

    def read(
        self,
        path: str,
        span: tuple[int, int] | None = None,
        *,
        version: str | None = None,
        most_bytes: int | None = None,
    ) -> Answer:
        del most_bytes
        del version
        with self.lock:
            self.calls[path] += 1
        return self.act(path, span)

    def info(self, path: str) -> ObjectInfo | None:
        self.act(path, None)
        return None

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for number in range(2500):
            if number % 1000 == 700:
                self.act(prefix, None)
            yield ObjectInfo(path=str(number), size_bytes=1, version="v")

    def top(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        self.act(prefix, None)
        return [], ["x"]

    def put(self, local: str, path: str) -> None:
        del local
        self.act(path, None)

    def close(self) -> None:
        self.closed += 1


def answer(path: str, span: tuple[int, int] | None) -> Answer:
    del path
    start, end = span or (0, 5)
    return Answer(data=bytes(end - start), version="v", object_bytes=end)


def numbered(count: int) -> list[ObjectRange]:
    return [ObjectRange(path=str(n), start=0, end=10, version=None) for n in range(count)]


# -- against a real server -------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_every_byte_comes_once_and_is_counted(server: Server, scheme: str) -> None:
    fetcher = make(server, scheme, FetchPolicy(hedge_least=10**6))
    spans = spans_of(fetcher)
    server.reset()
    check(spans, collect(fetcher, spans))
    check(spans[:3], collect(fetcher, spans[:3], urgent=False))
    fetcher.close()
    traffic = fetcher.meter.snapshot()
    assert server.requests == len(spans) + 3
    assert traffic.bytes_remote == server.bytes_sent
    assert traffic.requests == len(spans) + 3 + 4  # 4 looks at the objects
    assert (traffic.retries, traffic.failed, traffic.throttled) == (0, 0, 0)
    assert traffic.request_s > 0
    assert 0 < fetcher.request_time()[0] <= fetcher.request_time()[1]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_mixed_faults_give_right_bytes_with_few_requests(
    server: Server, scheme: str, seed: int
) -> None:
    fetcher = make(server, scheme)
    spans = spans_of(fetcher)
    kinds = tuple(kind for kind in FAULTS if kind != "other_etag")
    server.reset()
    server.faults = Faults(p=0.3, kinds=kinds, seed=seed)
    check(spans, collect(fetcher, spans))
    assert server.requests <= 3 * len(spans)
    assert set(server.faulted) == set(kinds)
    traffic = fetcher.meter.snapshot()
    assert traffic.failed >= traffic.retries > 0
    assert traffic.throttled > 0
    fetcher.close()


@pytest.mark.parametrize("kind", FAULTS)
def test_one_fault_of_each_kind(server: Server, kind: str) -> None:
    fetcher = make(server, "http")
    spans = spans_of(fetcher)[:40]
    server.faults = Faults(p=0.2, kinds=(kind,), seed=3)
    if kind == "other_etag":
        with pytest.raises(ObjectChangedError, match=r"0\.bin.*changed"):
            collect(fetcher, spans)
    else:
        check(spans, collect(fetcher, spans))
        assert server.faulted[kind] > 0
    fetcher.close()


@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind != "other_etag"])
def test_what_never_works_is_an_error_that_names_the_url(server: Server, kind: str) -> None:
    policy = FetchPolicy(
        max_attempts=3, backoff_base_s=0.001, read_timeout_s=0.3, retry_timeout_s=30.0
    )
    fetcher = make(server, "http", policy)
    spans = spans_of(fetcher)[:4]
    server.faults = Faults(p=1.0, kinds=(kind,))
    with pytest.raises(FetchError, match=r"/bucket/set/0\.bin: not fetched after") as caught:
        collect(fetcher, spans)
    assert caught.value.uri == f"{server.url}/bucket/set/0.bin"
    assert not caught.value.missing
    assert "Debug" not in str(caught.value)
    assert "\n" not in str(caught.value)
    fetcher.close()


def test_an_object_that_changes_in_the_middle_is_never_mixed(
    server: Server, tmp_path: Path
) -> None:
    fetcher = make(server, "s3")
    spans = [span for span in spans_of(fetcher) if span.path == "2.bin"]
    collect(fetcher, spans[:10])
    (tmp_path / "bucket" / "set" / "2.bin").write_bytes(content(7))
    with pytest.raises(ObjectChangedError) as caught:
        collect(fetcher, spans)
    assert caught.value.uri == "s3://bucket/set/2.bin"
    fetcher.close()


def test_a_missing_object_is_told_at_once(server: Server) -> None:
    fetcher = make(server, "s3")
    with pytest.raises(FetchError) as caught:
        fetcher.whole("nowhere")
    assert caught.value.missing
    assert server.requests == 1
    assert fetcher.info("nowhere") is None
    assert bytes(fetcher.whole("1.bin", size_bytes=SIZE).data) == content(1)
    with pytest.raises(ObjectChangedError):
        fetcher.whole("1.bin", size_bytes=5)
    fetcher.close()


def test_a_remote_that_is_gone_gets_few_probes_and_is_found_again(server: Server) -> None:
    fetcher = make(server, "http")
    spans = spans_of(fetcher)
    server.go_away()
    with pytest.raises(FetchError, match=r"\.bin: not fetched after"):
        collect(fetcher, spans)
    traffic = fetcher.meter.snapshot()
    assert traffic.requests < 200  # of 256 ranges, with 20 attempts each
    server.come_back()
    check(spans, collect(fetcher, spans))
    fetcher.close()


def test_listings_survive_faults(server: Server) -> None:
    fetcher = make(server, "s3")
    server.faults = Faults(p=0.3, kinds=("500", "503", "reset"), seed=5, listings=True)
    assert len(list(fetcher.walk())) == 4
    assert len(fetcher.top()[0]) == 4
    fetcher.close()


# -- against a scripted store ----------------------------------------------------------------------


def test_a_late_request_is_sent_twice_and_the_first_answer_wins() -> None:
    stuck = threading.Event()

    def act(path: str, span: tuple[int, int] | None) -> Answer:
        if path == "150" and store.calls[path] == 1:
            assert stuck.wait(30)
        return answer(path, span)

    store = Scripted(act)
    fetcher = Fetcher(store, policy=QUICK)
    assert len(collect(fetcher, numbered(151))) == 151
    assert store.calls["150"] == 2
    assert fetcher.meter.snapshot().hedges == 1
    stuck.set()
    fetcher.close()
    assert fetcher.meter.snapshot().bytes_remote == 152 * 10  # the loser's came too


def test_hedges_keep_to_their_share() -> None:
    stuck = threading.Event()

    def act(path: str, span: tuple[int, int] | None) -> Answer:
        if int(path) >= 100:
            stuck.wait(0.5)
        return answer(path, span)

    fetcher = Fetcher(Scripted(act), policy=QUICK)
    collect(fetcher, numbered(130))
    traffic = fetcher.meter.snapshot()
    assert 1 <= traffic.hedges <= QUICK.max_hedge_share * traffic.requests + 1
    stuck.set()
    fetcher.close()


def test_an_exception_of_deliver_stops_the_rest_and_is_raised() -> None:
    fetcher = Fetcher(Scripted(answer), policy=QUICK)

    def deliver(number: int, answer: Answer) -> None:
        del answer
        if number == 3:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        fetcher.fetch(numbered(500), deliver)
    assert collect(fetcher, numbered(5)) == [bytes(10)] * 5
    fetcher.close()


def test_nothing_is_delivered_after_fetch_has_raised() -> None:
    go_on = threading.Event()
    arrived = threading.Event()

    def act(path: str, span: tuple[int, int] | None) -> Answer:
        if path == "0":
            arrived.set()
            assert go_on.wait(30)
        elif path == "5":
            assert arrived.wait(30)
            raise RequestError("denied", "no")
        return answer(path, span)

    delivered: list[int] = []
    fetcher = Fetcher(Scripted(act), policy=QUICK)
    with pytest.raises(FetchError, match="denied"):
        fetcher.fetch(numbered(6), lambda number, _: delivered.append(number))
    known = list(delivered)
    go_on.set()
    fetcher.close()
    assert delivered == known
    assert 0 not in delivered


def test_a_mistake_in_a_store_surfaces() -> None:
    def act(path: str, span: tuple[int, int] | None) -> Answer:
        raise ZeroDivisionError(path, span)

    fetcher = Fetcher(Scripted(act), policy=QUICK)
    with pytest.raises(ZeroDivisionError):
        collect(fetcher, numbered(3))
    fetcher.close()


def test_total_failure_ends_within_its_time() -> None:
    stuck = threading.Event()

    def act(path: str, span: tuple[int, int] | None) -> Answer:
        stuck.wait(30)
        return answer(path, span)

    fetcher = Fetcher(Scripted(act), policy=FetchPolicy(retry_timeout_s=0.2))
    with pytest.raises(FetchError, match="no answer came"):
        collect(fetcher, numbered(100))
    stuck.set()
    fetcher.close()


def test_retry_after_is_waited_for() -> None:
    def act(path: str, span: tuple[int, int] | None) -> Answer:
        if store.calls[path] == 1:
            raise RequestError("throttled", "slow down", retry_after_s=100.0)
        return answer(path, span)

    store = Scripted(act)
    fetcher = Fetcher(store, policy=FetchPolicy(retry_timeout_s=0.3))
    with pytest.raises(FetchError, match="slow down"):
        collect(fetcher, numbered(1))
    assert store.calls["0"] == 1  # it was not tried before its time
    fetcher.close()


def test_a_fill_leaves_connections_to_who_is_waiting() -> None:
    stuck = threading.Event()
    filling = threading.Event()

    def act(path: str, span: tuple[int, int] | None) -> Answer:
        if path.isdigit() and not stuck.is_set():
            filling.set()
            assert stuck.wait(30)
        return answer(path, span)

    fetcher = Fetcher(Scripted(act), policy=QUICK)
    fill = threading.Thread(target=collect, args=(fetcher, numbered(200)), kwargs={"urgent": False})
    fill.start()
    assert filling.wait(30)
    fetcher.whole("urgent")  # comes through while every connection of the fill is stuck
    stuck.set()
    fill.join(30)
    assert not fill.is_alive()
    fetcher.close()


def test_many_callers_share_the_connections() -> None:
    lock = threading.Lock()
    now = peak = 0

    def act(path: str, span: tuple[int, int] | None) -> Answer:
        nonlocal now, peak
        with lock:
            now += 1
            peak = max(peak, now)
        found = answer(path, span)
        with lock:
            now -= 1
        return found

    policy = FetchPolicy(min_connections=2, start_connections=4, max_connections=6)
    fetcher = Fetcher(Scripted(act), policy=policy)
    callers = [threading.Thread(target=collect, args=(fetcher, numbered(100))) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert fetcher.meter.snapshot().requests >= 800
    assert peak <= 6 + 8  # and the hedges
    fetcher.close()


def test_close_ends_who_waits_and_the_threads() -> None:
    stuck = threading.Event()
    started = threading.Event()

    def act(path: str, span: tuple[int, int] | None) -> Answer:
        started.set()
        stuck.wait(30)
        return answer(path, span)

    store = Scripted(act)
    fetcher = Fetcher(store, policy=QUICK)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            collect(fetcher, numbered(5))
        except ClosedError as error:
            raised.append(error)
            stuck.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert started.wait(30)
    fetcher.close()
    fetcher.close()
    waiting.join(30)
    assert len(raised) == 1
    assert store.closed >= 1
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock-fetch")]
    with pytest.raises(ClosedError):
        fetcher.whole("x")


def test_a_walk_that_fails_goes_on_where_it_was() -> None:
    failures = iter([True, False, True, True, False, False, True] + [False] * 50)

    def act(path: str, span: tuple[int, int] | None) -> Answer:
        if next(failures):
            raise RequestError("transient", "cut")
        return answer(path, span)

    fetcher = Fetcher(Scripted(act), policy=QUICK)
    assert [info.path for info in fetcher.walk()] == [str(number) for number in range(2500)]
    fetcher.put("local", "path")
    assert fetcher.top() == ([], ["x"])
    fetcher.close()


def test_no_thread_before_the_first_request_and_none_for_no_spans() -> None:
    before = threading.active_count()
    fetcher = Fetcher(Scripted(answer), policy=QUICK)
    fetcher.fetch([], lambda *_: None)
    assert threading.active_count() == before
    assert fetcher.request_time() == (0.0, 0.0)
    fetcher.close()


_INTERRUPTED = """
import random, threading
from penstock.cache.fetch.fetcher import Fetcher, FetchPolicy
from tests.cache.fetch.test_fetch import Scripted, answer, collect, numbered
started, stuck = threading.Event(), threading.Event()
def act(path, span):
    if path == "7": started.set()
    stuck.wait(30); return answer(path, span)
def tell():
    started.wait(30); print("started", flush=True)
teller = threading.Thread(target=tell)
teller.start()
fetcher = Fetcher(Scripted(act), policy=FetchPolicy(start_connections=8))
try:
    collect(fetcher, numbered(100))
except KeyboardInterrupt:
    stuck.set()
    fetcher.close()
    teller.join()
    names = [t.name for t in threading.enumerate()]
    print("left", names, fetcher._in_flight, flush=True)
"""


def test_ctrl_c_leaves_nothing_behind() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert out.splitlines()[-1] == "left ['MainThread'] 0"


_FORKED = """
import os, sys
from penstock.cache.errors import FetchError
from penstock.cache.fetch.fetcher import Fetcher
from penstock.cache.stores.opening import open_store
url, options = sys.argv[1], eval(sys.argv[2])
store = open_store(url, options)
fetcher = Fetcher(store)
assert fetcher.info("0.bin") is not None
pid = os.fork()
if not pid:
    code = 1
    for attempt in (lambda: fetcher.whole("0.bin"), lambda: Fetcher(store).whole("0.bin"),
                    lambda: Fetcher(open_store(url, options)).whole("0.bin")):
        try:
            code += 10 * (len(attempt().data) > 0)
        except FetchError as error:
            code += "forkserver" in str(error)
    os._exit(code)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
assert fetcher.info("0.bin") is not None
fetcher.close()
"""


@pytest.mark.parametrize(("scheme", "code"), [("s3", 4), ("http", 13)])
def test_a_forked_child_is_refused_with_the_remedy(server: Server, scheme: str, code: int) -> None:
    """A store of its own is refused only where obstore's threads would be needed."""
    url, options = server.s3("bucket/set"), server.s3_options
    if scheme == "http":
        url, options = f"{server.url}/bucket/set", {}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKED, url, repr(options)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout) == (0, f"{code}\n")


# -- secrets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [None, "500", "reset", "short", "other_etag"])
def test_no_secret_is_shown(
    server: Server, fault: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []
    secrets = [
        "hushKEY1234",
        "hushSECRET1",
        "hushTOKEN12",
        "hushSIGNED1",
        "hushUSER123",
        "hushPASS123",
    ]
    bare = server.url.removeprefix("http://")
    places: list[tuple[str, dict[str, Any]]] = [
        (
            "s3://bucket/set",
            {
                "key": secrets[0],
                "secret": secrets[1],
                "token": secrets[2],
                "endpoint_url": server.url,
            },
        ),
        (f"{server.url}/bucket/set?X-Amz-Signature={secrets[3]}&part=1", {}),
        (f"http://{secrets[4]}:{secrets[5]}@{bare}/bucket/set", {}),
        (f"{server.url}/bucket/set", {"headers": {"Authorization": f"Bearer {secrets[2]}"}}),
    ]
    policy = FetchPolicy(max_attempts=2, backoff_base_s=0.001)
    for url, options in places:
        server.faults = Faults()
        store = open_store(url, options)
        fetcher = Fetcher(store, policy=policy)
        assert bytes(fetcher.whole("0.bin").data) == content(0)
        server.faults = Faults(p=1.0 if fault else 0.0, kinds=(fault or "500",))
        spans = [ObjectRange(path="0.bin", start=0, end=100, version="other")]
        for attempt in (
            lambda fetcher=fetcher, spans=spans: collect(fetcher, spans),
            lambda fetcher=fetcher: fetcher.whole("nowhere"),
        ):
            with pytest.raises(FetchError) as caught:
                attempt()
            shown += [str(caught.value), repr(caught.value), caught.value.uri]
            assert caught.value.__cause__ is None
        shown += [repr(store), store.url, store.scope, repr(fetcher.meter.snapshot())]
        fetcher.close()
    text = "\n".join([*shown, caplog.text])
    assert [secret for secret in secrets if secret in text] == []


def test_signed_urls_and_user_info_reach_the_server(server: Server) -> None:
    bare = server.url.removeprefix("http://")
    fetcher = Fetcher(open_store(f"http://us%40er:pa%3Ass@{bare}/bucket/set?sig=abcdef", {}))
    assert len(list(fetcher.walk())) == 4
    assert bytes(fetcher.whole("0.bin").data) == content(0)
    import base64

    sent = server.headers_of["/bucket/set/0.bin"]["authorization"]
    assert base64.b64decode(sent.removeprefix("Basic ")) == b"us@er:pa:ss"
    fetcher.close()


# -- the arithmetic --------------------------------------------------------------------------------


@given(
    attempts=st.integers(0, 10_000),
    seed=st.integers(0, 100),
    throttled=st.booleans(),
    after=st.none() | st.floats(0, 1000),
)
def test_a_pause_is_bounded_and_never_before_retry_after(
    attempts: int, seed: int, throttled: bool, after: float | None
) -> None:
    policy = FetchPolicy()
    pause = backoff_s(
        policy, attempts, random.Random(seed), throttled=throttled, retry_after_s=after
    )
    assert (after or 0) <= pause <= (after or 0) + policy.backoff_cap_s


@given(values=st.lists(st.floats(0, 100), min_size=1), share=st.floats(0, 1))
def test_a_quantile_is_passed_by_no_more_than_the_rest(values: list[float], share: float) -> None:
    found = quantile(sorted(values), share)
    assert found in values
    assert sum(value > found for value in values) <= (1 - share) * len(values) + 1e-9


@settings(max_examples=50)
@given(times=st.lists(st.floats(1e-4, 10), min_size=0, max_size=300), size=st.integers(1, 10**9))
def test_late_is_later_than_the_usual(times: list[float], size: int) -> None:
    policy = FetchPolicy()
    recent = RequestTimes(policy)
    for seconds in times:
        recent.add(size, seconds)
    late = recent.late_after_s(size)
    assert recent.late_after_s(size * 1000) is None  # another size is another matter
    if len(times) < policy.hedge_least:
        assert late is None
    else:
        assert late is not None
        assert late >= policy.hedge_floor_s
    mean, worst = recent.summary()
    assert mean <= worst or worst == pytest.approx(mean)


@settings(max_examples=50)
@given(
    steps=st.lists(
        st.tuples(st.floats(0.001, 1), st.integers(0, 10**8), st.floats(0.001, 20), st.booleans()),
        max_size=300,
    )
)
def test_connections_stay_within_their_bounds(
    steps: list[tuple[float, int, float, bool]],
) -> None:
    policy = FetchPolicy()
    connections = Connections(policy)
    now = 100.0
    for passed, size, seconds, throttled in steps:
        now += passed
        before = connections.limit
        if throttled:
            connections.throttled(now)
            assert connections.limit <= before
        else:
            connections.done(now, size_bytes=size, seconds=seconds)
        assert policy.min_connections <= connections.limit <= policy.max_connections


@pytest.mark.parametrize(
    ("rate", "request_s", "wanted"),
    [(50.0, 0.1, 8), (200.0, 0.1, 25), (400.0, 0.1, 50)],
)
def test_a_steady_consumer_gets_a_quarter_more_than_it_needs(
    rate: float, request_s: float, wanted: int
) -> None:
    """Requests a second times seconds a request, by Little's law, and a quarter."""
    connections = Connections(FetchPolicy(standing_connections=8))
    now = 0.0
    for _ in range(20_000):
        now += max(1 / rate, request_s / connections.limit)
        connections.done(now, size_bytes=2**20, seconds=request_s)
    assert connections.limit == pytest.approx(wanted, abs=5)


def test_a_pause_costs_no_connections_that_a_burst_needs() -> None:
    policy = FetchPolicy()
    connections = Connections(policy)
    for number in range(5000):  # a request now and then
        connections.done(0.1 * number, size_bytes=2**20, seconds=0.05)
    assert connections.limit == policy.standing_connections
    connections.throttled(1000.0)
    connections.throttled(2000.0)
    connections.throttled(3000.0)
    assert connections.limit == policy.min_connections


def test_a_full_link_ends_the_growth() -> None:
    """More connections make each slower: 100 MB/s in all, whatever their number."""
    connections = Connections(FetchPolicy(start_connections=8))
    now = 0.0
    for _ in range(3000):
        now += 0.01
        connections.done(now, size_bytes=10**6, seconds=0.01 * connections.limit)
    assert connections.limit < 32


def test_a_failing_remote_gets_probes_and_one_success_opens_the_way() -> None:
    policy = FetchPolicy()
    health = Health(policy)
    jitter = random.Random(0)
    for _ in range(Health.GONE_AFTER - 1):
        health.failure(0.0, jitter)
    assert health.may_start_s(0.0, 1000) == 0
    for _ in range(50):  # all at one moment: one pause, not fifty
        health.failure(0.0, jitter)
    assert health.is_gone
    pause = health.may_start_s(0.0, 0)
    assert 0 < pause <= 2 * policy.backoff_base_s
    assert health.may_start_s(pause, 1) == 0
    assert health.may_start_s(pause, policy.probes) == float("inf")
    health.success(pause)
    assert health.may_start_s(pause, 1000) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"retry_timeout_s": 0},
        {"read_timeout_s": -1.0},
        {"max_attempts": 0},
        {"min_connections": 0},
        {"min_connections": 80},
    ],
)
def test_nonsense_limits_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="got"):
        FetchPolicy(**wrong)


def test_the_process_has_no_stray_threads() -> None:
    assert os.getpid() > 0
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock-")]
