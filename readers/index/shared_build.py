"""Let one process of a job build a dataset's index while the others wait for it.

Processes wait on the job's store, not on a file system, and only after another process has
announced that it builds. So rank 0 can build the index of a validation set alone. A builder that
fails publishes its error; a builder that stops publishing its progress is taken for dead. If other
nodes don't see the index's folder, a small index is sent to them in pieces through the store; for a
large one, such a node builds its own.

Keys, below index/KEY/ATTEMPT, where an attempt is one more after each builder that failed:

| key       | who writes                         | who waits, and how long                        |
|-----------|------------------------------------|------------------------------------------------|
| builder   | the first process                  | none: the others learn that they don't build   |
| beat      | the builder, each `BEAT_S`         | none: silence of `SILENT_S` counts as its      |
|           |                                    | death                                          |
| done      | the builder, as it ends or fails   | the others, at most `WAIT_S`                   |
| piece0, … | the builder, before `done`         | none                                           |
| failed    | the first that notices a failure   | none                                           |
| left      | each process that has read `done`  | none: the last one empties the pieces          |
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import secrets
import socket
import sys
import threading
import time
import zipfile
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache import (
    DatasetError,
    JobStore,
    JobStoreError,
    PenstockError,
    StalledError,
    Workers,
    error_of_kind,
    log,
)
from penstock.readers.files import make_folder, write_bytes
from penstock.readers.index.manifest import MANIFEST, Manifest, is_sidecar_name
from penstock.readers.origin import QUARANTINE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.readers.types import Progress


BEAT_S = 5.0
SILENT_S = 30.0
"""A builder that published nothing for this long is taken for dead."""

WAIT_S = 12 * 3600.0
MOST_PIECES_BYTES = 4 * 2**20
"""The largest compressed index that is copied into the store if other nodes most likely see its
folder. The store's server is one of the ranks."""
MOST_OWN_BYTES = 128 * 2**20
"""The largest compressed index that is copied if only the builder's node sees its folder. The copy
is removed later."""

_MOST_FILES_BYTES = 512 * 2**20
_PIECE_BYTES = 256 * 2**10


class BuildReport(NamedTuple):
    """The result of a build. error: its message, "" on success. kind: the error's class. pieces:
    the number of pieces of the index in the store, 0 if it was too large."""

    builder: str
    error: str = ""
    kind: str = ""
    place: str = ""
    pieces: int = 0


@dataclass(slots=True)
class SharedBuild:
    """Coordinate the processes of a job that need one index. key: identifies the index. progress:
    called on the builder."""

    store: JobStore
    key: str
    url: str
    progress: Progress | None = None
    _me: str = field(
        default_factory=lambda: (
            f"process {os.getpid()} of {socket.gethostname()} {secrets.token_hex(4)}"
        )
    )
    _done: tuple[int, int] = (0, 0)
    _attempt: str = "0"  # the number of builders that failed before

    @classmethod
    def of_job(cls, named: str, url: str, progress: Progress | None) -> SharedBuild | None:
        """Join the build in the current process group; None without a group, or with one process.
        named: identifies the dataset and the index's place."""
        store = JobStore.of_group()
        if store is None or sys.modules["torch.distributed"].get_world_size() < 2:
            return None
        key = hashlib.sha256(named.encode("utf-8", "surrogateescape")).hexdigest()[:24]
        return cls(store.under("index"), key, url, progress)

    def claim(self) -> bool:
        """Return True if this process builds. Call it once, then `building` or `wait`."""
        self._attempt = self.store.get(f"{self.key}/attempt") or "0"
        return self.store.set_once(self._name("builder"), self._me) == self._me

    @property
    def _shown(self) -> str:
        return self._me.rpartition(" ")[0]

    def _name(self, what: str) -> str:
        return f"{self.key}/{self._attempt}/{what}"

    def _give_up(self) -> None:
        """Mark this attempt as failed, so that a later one doesn't receive its error. The first
        process that notices does this for all."""
        if self.store.set_once(self._name("failed"), self._me) == self._me:
            self.store.add(f"{self.key}/attempt", 1)

    def report_progress(self, done: int, total: int, done_bytes: int) -> None:
        """Record the builder's progress."""
        self._done = (done, total)
        if self.progress is not None:
            self.progress(done, total, done_bytes)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Publish that this process lives while it builds, and its error if it fails."""
        ended, heartbeat = threading.Event(), Workers(1, name="index-beat")
        heartbeat.submit(self._beats, ended)
        try:
            yield
        except BaseException as error:
            kind = type(error).__name__ if isinstance(error, PenstockError) else ""
            shown = f"{error}"[:2000] or kind or "interrupted"
            with suppress(JobStoreError):  # then only this process raises the error
                self._end(BuildReport(self._shown, shown, kind))
                self._give_up()
            raise
        finally:
            ended.set()
            heartbeat.close(timeout_s=1.0)

    def _beats(self, ended: threading.Event) -> None:
        number = 0
        try:
            while not number or not ended.wait(BEAT_S):
                self.store.set(self._name("beat"), json.dumps([number, *self._done]))
                number += 1
        except JobStoreError as error:  # the next request to the store raises it
            log.warning("%s", error)

    def _end(self, report: BuildReport) -> None:
        self.store.set(self._name("done"), json.dumps(report))

    def publish(self, manifest: Manifest, place: bytes, *, is_own: bool = False) -> None:
        """Publish the finished index: its folder, and a copy if it is small enough. is_own: True if
        other nodes don't see the folder."""
        text = encode_index(manifest, place, MOST_OWN_BYTES if is_own else MOST_PIECES_BYTES) or ""
        starts = range(0, len(text), _PIECE_BYTES)
        for number, start in enumerate(starts):
            self.store.set(self._name(f"piece{number}"), text[start : start + _PIECE_BYTES])
        self._end(BuildReport(self._shown, place=os.fsdecode(place), pieces=len(starts)))

    def wait(self) -> BuildReport:
        """Wait for the builder and return its report. Raises its error, and StalledError if it is
        dead."""
        builder = (self.store.get(self._name("builder")) or "").rpartition(" ")[0]
        began = changed = logged = time.monotonic()
        beat = ""
        while (done := self.store.wait(self._name("done"), timeout_s=BEAT_S)) is None:
            now, latest = time.monotonic(), self.store.get(self._name("beat")) or ""
            if latest != beat:
                beat, changed = latest, now
            if now - changed > SILENT_S or now - began > WAIT_S:
                self._give_up()
                raise StalledError(
                    f"{self.url}: {builder} was building the index for all processes of the job, "
                    f"but has published no progress for {now - changed:.0f} s. Check the output of "
                    "that process, then start the job again. If you run `penstock index` before "
                    "the job, no process has to wait."
                )
            if now - logged > 2 * BEAT_S:
                logged = now
                _, checked, total = json.loads(beat or "[0, 0, 0]")
                text = "%s: waiting for %s, which is building the index: %d of %d samples"
                log.info(text, self.url, builder, checked, total)
        report = BuildReport(*json.loads(done))
        if report.error:
            message = f"{self.url}: {builder} failed to build the index for the job: {report.error}"
            raise error_of_kind(report.kind, message, default=DatasetError)
        return report

    def leave(self, report: BuildReport) -> None:
        """Count this process as served. The last one of the job removes the copy from the store."""
        others = sys.modules["torch.distributed"].get_world_size() - 1
        with suppress(JobStoreError):
            if report.pieces and self.store.add(self._name("left"), 1) == others:
                for number in range(report.pieces):
                    self.store.set(self._name(f"piece{number}"), "")

    def receive(self, report: BuildReport, place: bytes) -> bool:
        """Write the copy of the index from the store into a folder. Return False if there is no
        copy. Raises WriteError."""
        pieces = [self.store.get(self._name(f"piece{n}")) or "" for n in range(report.pieces)]
        files = decode_index("".join(pieces)) if all(pieces) else None
        if files is None:
            return False
        for name in sorted(files, key=lambda name: name == MANIFEST):  # the manifest last
            make_folder(os.path.dirname(os.path.join(place, name)))
            write_bytes(os.path.join(place, name), files[name])
        return True


def encode_index(manifest: Manifest, place: bytes, most_bytes: int) -> str | None:
    """Encode the files of an index as a text, or return None if they are too large or gone."""
    names, packed = [*manifest.names, QUARANTINE, MANIFEST], io.BytesIO()
    try:
        if sum(os.stat(os.path.join(place, name)).st_size for name in names) > _MOST_FILES_BYTES:
            return None
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
            for name in names:
                with open(os.path.join(place, name), "rb") as part:
                    file.writestr(os.fsdecode(name), part.read())
    except FileNotFoundError:
        return None
    data = packed.getvalue()
    return base64.b64encode(data).decode() if len(data) <= most_bytes else None


def decode_index(text: str) -> Mapping[bytes, bytes] | None:
    """Decode the files of an index by name; None if the text is malformed."""
    try:
        with zipfile.ZipFile(io.BytesIO(base64.b64decode(text))) as file:
            infos = {os.fsencode(info.filename): info for info in file.infolist()}
            others = infos.keys() - {QUARANTINE, MANIFEST}
            if len(infos) < len(others) + 2 or not all(map(is_sidecar_name, others)):
                return None
            if sum(info.file_size for info in infos.values()) > _MOST_FILES_BYTES:
                return None
            return {name: file.read(info) for name, info in infos.items()}
    except (ValueError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError):
        return None
