"""Test the fetcher with real servers and processes: few requests, errors that name the URL, no
credentials in any output, clean ends.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cache import FetchError, ObjectChangedError
from penstock.cache.base import FetchPolicy, ObjectRange
from penstock.cache.fetch import Fetcher
from penstock.cache.stores import open_store
from tests.cache.fetch.scripted import collect
from tests.cache.fetch.served import PATIENT, SIZE, check, content, make, spans_of
from tests.servers import FAULTS, Faults, Server
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_every_byte_comes_once_and_is_counted(server: Server, scheme: str) -> None:
    fetcher = make(server, scheme, FetchPolicy(hedge_least=10**6), PATIENT)
    spans = spans_of(fetcher)
    server.reset()
    check(spans, collect(fetcher, spans))
    check(spans[:3], collect(fetcher, spans[:3], urgent=False))
    fetcher.close()
    traffic = fetcher.meter.snapshot()
    assert server.requests == len(spans) + 3
    assert traffic.bytes_remote == server.bytes_sent
    assert traffic.requests == len(spans) + 3 + 4  # 4 requests for the objects' facts
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


def test_a_missing_object_is_reported_at_once(server: Server) -> None:
    fetcher = make(server, "s3", options=PATIENT)
    with pytest.raises(FetchError) as caught:
        fetcher.fetch_object("nowhere")
    assert caught.value.missing
    assert server.requests == 1
    assert fetcher.info("nowhere") is None
    assert bytes(fetcher.fetch_object("1.bin", size_bytes=SIZE).data) == content(1)
    with pytest.raises(ObjectChangedError):
        fetcher.fetch_object("1.bin", size_bytes=5)
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
    assert len(fetcher.list_folder()[0]) == 4
    fetcher.close()


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
        assert bytes(fetcher.fetch_object("0.bin").data) == content(0)
        server.faults = Faults(p=1.0 if fault else 0.0, kinds=(fault or "500",))
        spans = [ObjectRange(path="0.bin", start=0, end=100, version="other")]
        for attempt in (
            lambda fetcher=fetcher, spans=spans: collect(fetcher, spans),
            lambda fetcher=fetcher: fetcher.fetch_object("nowhere"),
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
    assert bytes(fetcher.fetch_object("0.bin").data) == content(0)
    import base64

    sent = server.headers_of["/bucket/set/0.bin"]["authorization"]
    assert base64.b64decode(sent.removeprefix("Basic ")) == b"us@er:pa:ss"
    fetcher.close()


_INTERRUPTED = """
import random, threading
from penstock.cache.base import FetchPolicy
from penstock.cache.fetch import Fetcher
from tests.cache.fetch.scripted import Scripted, answer, collect, numbered
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
    print("left", names, fetcher._scheduler.budget.in_flight, flush=True)
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
from penstock.cache.fetch import Fetcher
from penstock.cache.stores import open_store
url, options = sys.argv[1], eval(sys.argv[2])
store = open_store(url, options)
fetcher = Fetcher(store)
assert fetcher.info("0.bin") is not None
pid = os.fork()
if not pid:
    code = 1
    fetchers = lambda: fetcher, lambda: Fetcher(store), lambda: Fetcher(open_store(url, options))
    for make in fetchers:
        try:
            code += 10 * (len(make().fetch_object("0.bin").data) > 0)
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
