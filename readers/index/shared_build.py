"""Let one process of a job build a dataset's index while the others wait for it.

They wait on the job's store, not on a file system, and only where somebody has said that it builds:
rank 0 alone, with a validation set, builds and goes on. A builder that fails publishes its error; a
builder that is gone falls silent. An index that lies where another node doesn't see it is sent
there in pieces through the store, if it is small; else that node builds its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.cache import (
    DatasetError,
    JobStore,
    JobStoreError,
    PenstockError,
    StalledError,
    Workers,
    errors,
)
from penstock.readers.files import make_folder, write_bytes
from penstock.readers.index.manifest import is_sidecar_name
from penstock.readers.index.manifest_file import MANIFEST
from penstock.readers.origin import QUARANTINE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.readers.index.manifest import Manifest
    from penstock.readers.types import Progress

_log = logging.getLogger("penstock")

BEAT_S = 5.0
SILENT_S = 30.0
"""A builder that told nothing for so long is gone."""

WAIT_S = 12 * 3600.0
MOST_PIECES_BYTES = 4 * 2**20
"""Of a compressed index that other nodes most likely see, in the store, whose server is one of the
ranks."""
MOST_OWN_BYTES = 128 * 2**20
"""The same of one that lies in a folder of the builder's node alone. It leaves the store again."""

_MOST_FILES_BYTES = 512 * 2**20
_MOST_NAMES_BYTES = 64 * 2**20
_PIECE_BYTES = 256 * 2**10


@dataclass(frozen=True, slots=True)
class BuildReport:
    """How a builder ended. error: its message, "" where the index stands; pieces: of the index in
    the store, 0 where it was too large."""

    builder: str
    error: str = ""
    kind: str = ""
    place: str = ""
    pieces: int = 0

    def check(self, url: str) -> None:
        """Raise the builder's error, if it had one."""
        if self.error:
            kind = getattr(errors, self.kind, DatasetError)
            message = f"{url}: {self.builder} built the index for the job, and failed: {self.error}"
            try:
                raised = kind(message)
            except TypeError:
                raised = DatasetError(message)
            assert isinstance(raised, PenstockError)
            raise raised


@dataclass(slots=True)
class SharedBuild:
    """The agreement of a job's processes on who builds one index. key: names the index; progress:
    called as ever, on the builder."""

    store: JobStore
    key: str
    url: str
    progress: Progress | None = None
    _me: str = field(
        default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    )
    _done: tuple[int, int] = (0, 0)
    _attempt: str = "0"  # the number of builders that failed before

    @classmethod
    def of_job(cls, named: str, url: str, progress: Progress | None) -> SharedBuild | None:
        """Of the process group that stands; None without one, or with one process. named: what the
        index is of, and where it was asked for."""
        distributed = sys.modules.get("torch.distributed")
        store = JobStore.of_group()
        if distributed is None or store is None or distributed.get_world_size() < 2:
            return None
        key = hashlib.sha256(named.encode("utf-8", "surrogateescape")).hexdigest()[:24]
        return cls(store.under("index"), key, url, progress)

    def claim(self) -> bool:
        """Whether this process builds. Asked once; then `building`, or `wait`."""
        self._attempt = self.store.get(f"{self.key}/attempt") or "0"
        return self.store.set_once(self._name("builder"), self._me) == self._me

    def _name(self, what: str) -> str:
        return f"{self.key}/{self._attempt}/{what}"

    def _give_up(self) -> None:
        """This attempt has failed: a later one isn't met with its error. Who comes first says so,
        for all."""
        if self.store.set_once(self._name("failed"), self._me) == self._me:
            self.store.add(f"{self.key}/attempt", 1)

    def told(self, done: int, total: int, done_bytes: int) -> None:
        """The builder's progress."""
        self._done = (done, total)
        if self.progress is not None:
            self.progress(done, total, done_bytes)

    @contextmanager
    def building(self) -> Iterator[None]:
        """While this process builds: the others hear that it lives, and what its error was."""
        ended, beat = threading.Event(), Workers(1, name="index-beat")
        self._beat(0)
        beat.submit(self._beats, ended)
        try:
            yield
        except BaseException as error:
            kind = type(error).__name__ if isinstance(error, PenstockError) else ""
            with suppress(JobStoreError):  # then the others hear nothing; the error is this one
                self._end(
                    BuildReport(self._shown(self._me), f"{error}" or kind or "interrupted", kind)
                )
                self._give_up()
            raise
        finally:
            ended.set()
            beat.close(timeout_s=1.0)

    def _beats(self, ended: threading.Event) -> None:
        number = 0
        try:
            while not ended.wait(BEAT_S):
                number += 1
                self._beat(number)
        except JobStoreError as error:  # who asks it next says so
            _log.warning("%s", error)

    def _beat(self, number: int) -> None:
        self.store.set(self._name("beat"), json.dumps([number, *self._done]))

    def _end(self, report: BuildReport) -> None:
        told = [report.builder, report.error[:2000], report.kind, report.place, report.pieces]
        self.store.set(self._name("done"), json.dumps(told))

    def publish(self, manifest: Manifest, place: bytes, *, is_own: bool = False) -> None:
        """The index stands: where it does, and a copy where it isn't too large. is_own: other nodes
        don't see the place."""
        pieces = 0
        packed = _packed(manifest, place, MOST_OWN_BYTES if is_own else MOST_PIECES_BYTES)
        if packed is not None:
            for start in range(0, len(packed), _PIECE_BYTES):
                self.store.set(self._name(f"piece{pieces}"), packed[start : start + _PIECE_BYTES])
                pieces += 1
        self._end(BuildReport(self._shown(self._me), place=os.fsdecode(place), pieces=pieces))

    def wait(self) -> BuildReport:
        """Wait for the builder. Raises its error, and StalledError where it is gone."""
        builder = self._shown(self.store.get(self._name("builder")) or "")
        began = heard = logged = time.monotonic()
        beat = ""
        while self.store.wait([self._name("done")], timeout_s=BEAT_S):
            now, latest = time.monotonic(), self.store.get(self._name("beat")) or ""
            if latest != beat:
                beat, heard = latest, now
            if now - heard > SILENT_S or now - began > WAIT_S:
                self._give_up()
                raise StalledError(
                    f"{self.url}: {builder} was building the index for all processes of the job, "
                    f"and hasn't been heard from for {now - heard:.0f} s. The output of "
                    "that process says more. With `penstock index` before the job no process has "
                    "to wait. Another try builds anew."
                )
            if now - logged > 2 * BEAT_S:
                logged = now
                _, done, total = json.loads(beat) if beat else (0, 0, 0)
                _log.info(
                    "Waiting for the index of %s, which %s is building: %d of %d samples",
                    self.url,
                    builder,
                    done,
                    total,
                )
        report = BuildReport(*json.loads(self.store.get(self._name("done")) or "[]"))
        report.check(self.url)
        return report

    @staticmethod
    def _shown(me: str) -> str:
        host, process, _ = [*me.split(":"), "", "", ""][:3]
        return f"process {process} of {host}"

    def leave(self, report: BuildReport) -> None:
        """This process has an index. The last of the job's takes the copy out of the store."""
        others = sys.modules["torch.distributed"].get_world_size() - 1
        with suppress(JobStoreError):
            if report.pieces and self.store.add(self._name("left"), 1) == others:
                for number in range(report.pieces):
                    self.store.set(self._name(f"piece{number}"), "")

    def receive(self, report: BuildReport, place: bytes) -> bool:
        """Put the copy of the index that came through the store into a folder; False where none
        came. Raises WriteError."""
        told = [self.store.get(self._name(f"piece{n}")) for n in range(report.pieces)]
        files = _unpacked("".join(each or "" for each in told)) if all(told) and told else None
        if files is None:
            return False
        for name in sorted(files, key=lambda name: name == MANIFEST):  # the manifest last
            make_folder(os.path.dirname(os.path.join(place, name)))
            write_bytes(os.path.join(place, name), files[name])
        return True


def _packed(manifest: Manifest, place: bytes, most_bytes: int) -> str | None:
    """An index as a text; None where it is too large for that."""
    names = [*manifest.names, QUARANTINE, MANIFEST]
    paths = [os.path.join(place, name) for name in names]
    packer = zlib.compressobj(1)
    try:
        sizes = [os.stat(path).st_size for path in paths]
        if sum(sizes) > _MOST_FILES_BYTES:
            return None
        told = dict(zip(map(os.fsdecode, names), sizes, strict=True))
        parts = [packer.compress(json.dumps(told).encode() + b"\n")]
        for path, size in zip(paths, sizes, strict=True):
            with open(path, "rb") as file:
                data = file.read(size + 1)
            if len(data) != size:
                return None
            parts.append(packer.compress(data))
    except FileNotFoundError:
        return None
    packed = b"".join([*parts, packer.flush()])
    return base64.b64encode(packed).decode() if len(packed) <= most_bytes else None


def _unpacked(text: str) -> Mapping[bytes, bytes] | None:
    """The files of an index by name; None for what isn't that."""
    opened = zlib.decompressobj()
    try:
        told = opened.decompress(base64.b64decode(text), _MOST_FILES_BYTES + _MOST_NAMES_BYTES)
        at = told.index(b"\n") + 1
        sizes = {os.fsencode(name): size for name, size in json.loads(told[:at]).items()}
    except (ValueError, zlib.error, AttributeError, TypeError, RecursionError):
        return None
    wanted = {QUARANTINE, MANIFEST}
    if not wanted <= set(sizes) or not all(n in wanted or is_sidecar_name(n) for n in sizes):
        return None
    if not all(type(size) is int and size >= 0 for size in sizes.values()):
        return None
    if not opened.eof or at + sum(sizes.values()) != len(told):
        return None
    files = {}
    for name, size in sizes.items():
        files[name], at = told[at : at + size], at + size
    return files
