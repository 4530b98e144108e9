"""Objects of known content on a test server, and a fetcher that reads them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from penstock.cache.base import ObjectRange
from penstock.cache.fetch import Fetcher
from penstock.cache.stores import open_store
from tests.cache.fetch.scripted import QUICK

if TYPE_CHECKING:
    from penstock.cache.base import FetchPolicy
    from tests.servers import Server

SIZE = 64 * 1024
STEP = 1024
OPTIONS = {"read_timeout": 1.0, "connect_timeout": 60.0, "retry_timeout": 300.0}
PATIENT = {"read_timeout": 60.0, "connect_timeout": 60.0, "retry_timeout": 120.0}
"""Of tests that count requests: a loaded machine may be slow, which is no fault to retry."""


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def make(
    server: Server, scheme: str, policy: FetchPolicy = QUICK, options: dict[str, Any] = OPTIONS
) -> Fetcher:
    if scheme == "s3":
        store = open_store("s3://bucket/set", {**server.s3_options, **options})
    else:
        store = open_store(f"{server.url}/bucket/set", options)
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


def check(spans: list[ObjectRange], found: list[bytes]) -> None:
    for span, data in zip(spans, found, strict=True):
        assert data == content(int(span.path[0]))[span.start : span.end]
