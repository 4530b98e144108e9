"""A store whose answers a test scripts, and helpers to read it with the fetcher."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from penstock.cache.base import Answer, FetchPolicy, ObjectInfo, ObjectRange, RequestError, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.cache.fetch import Fetcher

QUICK = FetchPolicy(
    retry_timeout_s=300.0,
    backoff_base_s=0.001,
    backoff_cap_s=0.01,
    read_timeout_s=1.0,
    connect_timeout_s=60.0,
    max_attempts=20,
)


def collect(fetcher: Fetcher, spans: list[ObjectRange], *, urgent: bool = True) -> list[bytes]:
    found: dict[int, bytes] = {}

    def deliver(number: int, answer: Answer) -> None:
        assert number not in found, "delivered twice"
        found[number] = bytes(answer.data)

    fetcher.fetch(spans, deliver, urgent=urgent)
    return [found[number] for number in range(len(spans))]


class Scripted(Store):
    """A store whose answers come from a function."""

    def __init__(self, act: Callable[[str, tuple[int, int] | None], Answer]) -> None:
        super().__init__(url="test://store")
        self.act = act
        self.calls: Counter[Any] = Counter()
        self.lock = threading.Lock()
        self.closed = 0

    def _read(
        self, path: str, span: tuple[int, int] | None, version: str | None, most_bytes: int | None
    ) -> Answer:
        del most_bytes
        del version
        with self.lock:
            self.calls[path] += 1
        return self.act(path, span)

    def _info(self, path: str) -> ObjectInfo:
        self.act(path, None)
        raise RequestError("missing", "it doesn't exist")

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for number in range(2500):
            if number % 1000 == 700:
                self.act(prefix, None)
            yield ObjectInfo(path=str(number), size_bytes=1, version="v")

    def list_folder(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
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
