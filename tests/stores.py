"""A store in memory that counts its reads and can be made to fail, for tests of the
layers above."""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING

from penstock.cache.base import Answer, ObjectInfo, RequestError, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class MemoryStore(Store):
    """A store in memory. objects: bytes by path. before: called with (path, span)
    before each read."""

    def __init__(self, objects: dict[str, bytes], *, url: str = "mem://bucket/set") -> None:
        self.objects = objects
        super().__init__(url=url, scope="00")
        self.reads: list[tuple[str, int, int]] = []
        self.asked = 0
        self.before: Callable[[str, tuple[int, int] | None], None] = lambda _path, _span: None
        self._lock = threading.Lock()

    @property
    def bytes_read(self) -> int:
        return sum(end - start for _, start, end in self.reads)

    def version(self, path: str) -> str:
        return hashlib.sha256(self.objects[path]).hexdigest()[:16]

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for path in sorted(self.objects):
            if not prefix or path.startswith(prefix + "/"):
                yield self._info(path)

    def list_folder(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        begin = prefix + "/" if prefix else ""
        names = [path.removeprefix(begin) for path in self.objects if path.startswith(begin)]
        found = [self._info(begin + name) for name in sorted(names) if "/" not in name]
        return found, sorted({name.split("/")[0] for name in names if "/" in name})

    def _info(self, path: str) -> ObjectInfo:
        return ObjectInfo(path=path, size_bytes=len(self.objects[path]), version=self.version(path))

    def info(self, path: str) -> ObjectInfo | None:
        self.asked += 1
        self.before(path, None)
        return self._info(path) if path in self.objects else None

    def _read(
        self, path: str, span: tuple[int, int] | None, version: str | None, most_bytes: int | None
    ) -> Answer:
        del most_bytes
        self.before(path, span)
        if path not in self.objects:
            raise RequestError("missing", "it isn't there")
        data, now = self.objects[path], self.version(path)
        if version not in (None, now):
            raise RequestError("changed", "another version")
        start, end = span or (0, len(data))
        with self._lock:
            self.reads.append((path, start, end))
        return Answer(data=data[start:end], version=now, object_bytes=len(data))

    def put(self, local: str, path: str) -> None:
        with open(local, "rb") as file:
            self.objects[path] = file.read()

    def close(self) -> None:
        pass
