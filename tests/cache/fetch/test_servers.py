"""Against a real server: the right bytes in few requests, or an error that names the URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.cache import FetchError, ObjectChangedError
from penstock.cache.base import FetchPolicy
from tests.cache.fetch.scripted import collect
from tests.cache.fetch.served import PATIENT, SIZE, check, content, make, spans_of
from tests.servers import FAULTS, Faults, Server

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
