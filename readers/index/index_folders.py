"""Choose the folder that holds a dataset's index, and read the manifest and the sidecars in it.

The candidates are `index=`, the place next to the data, the cache folder
and the user's cache directory. Next to `photos/` means `photos.penstock/`, never inside: other
tools take each folder inside for a class. Nothing is written to a remote store unless the user asks
for it. An index next to remote data is read, because the owner of the bucket may have put it there.

An index in a cache folder is only a copy of facts about the data, so damage to it must not end a
job: the shard's files or archive are listed and decoded again. The result must equal the facts in
the manifest that the job has in memory. Then ids and bytes are those that the job started with. The
part is written back if that is possible; else it stays in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import threading
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.cache import (
    ConfigError,
    CorruptShardError,
    DatasetError,
    DatasetNotFoundError,
    FetchError,
    IndexChangedError,
    OtherVersionError,
    PenstockWarning,
    ReadError,
    log,
)
from penstock.cache.base import is_shortage
from penstock.readers.byte_source import REINDEX, REOPEN
from penstock.readers.files import (
    below,
    is_passed_over,
    locked,
    make_folder,
    printable,
    write_bytes,
)
from penstock.readers.formats import Sidecar, read_sidecar
from penstock.readers.index.manifest import MANIFEST, SIDECARS, read_manifest, read_manifest_of
from penstock.readers.origin import QUARANTINE, local_path, show

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.readers.index.dataset_description import Folder
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.origin import Origin, Scratch


INDEXES = b"indexes"
"""The name of the folder of indexes in a cache folder and in the user's cache directory."""


def read_index(place: bytes) -> Manifest | None:
    """Read the manifest in a folder. Return None if there is none, or if it may be replaced: it is
    damaged, or it is of another version in a cache folder. Raises ConfigError for a pack's
    manifest, and OtherVersionError."""
    path = os.path.join(place, MANIFEST)
    try:
        # A cached index may be damaged during a job, which must not be able to end the job.
        manifest = read_manifest(path, remedy=REINDEX, mapped=not is_cached(place))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (CorruptShardError, OtherVersionError) as error:
        if isinstance(error, OtherVersionError) and not is_cached(place):
            raise
        log.warning("%s The index is rebuilt.", str(error).removesuffix(REINDEX).rstrip())
        return None
    return _of_no_pack(manifest, printable(place))


def _of_no_pack(manifest: Manifest, place: str) -> Manifest:
    if manifest.format.has_own_index:
        raise ConfigError(
            f"{place}: this is the folder of a pack's own index, wanted one for an index of other "
            "data. Give another folder as index=."
        )
    return manifest


def check_arrangement(manifest: Manifest, origin: Origin, *, shown: str) -> None:
    """Raise IndexChangedError if an index of the same data was built with other arguments. shown:
    its place, for messages."""
    if manifest.about.arrangement != origin.variant:
        raise IndexChangedError(
            f"{shown}: this index of {origin.url} was built with another manifest=, fields= with "
            "places, schema=, allow_empty=, max_pixels= or split=. Give the same arguments again, "
            "or another folder as index=."
        )


def is_cached(place: bytes) -> bool:
    """Return True if a place is in a cache folder or in the user's cache directory."""
    return os.path.basename(os.path.dirname(place)) == INDEXES


@dataclass(frozen=True, kw_only=True)
class IndexPlaces:
    """The folders that may hold one dataset's index, and the manifests there. index: the folder
    that the user gave: a local path or, for remote data, a URL of the same store."""

    origin: Origin
    scratch: Scratch
    index: Folder | None = None

    def candidates(self) -> list[bytes]:
        """Return the local folders that may hold the index, best first. There is at least one.
        Raises ConfigError."""
        if self._named is not None:
            return [self._named]
        places = self.origin.index_folders()
        if self.scratch.is_kept:
            places.append(self._temporary())
        if (home := self.home()) is not None:
            places.append(home)
        return places or [self._temporary()]

    def remote(self) -> Origin | None:
        """Return the remote folder that may hold a remote dataset's index: the one that the user
        gave, or the one next to the data. Return None for local data, or if there is no such place.
        Raises ConfigError."""
        if self._named is not None:
            return None
        return self.origin.index_place(None if self.index is None else os.fspath(self.index))

    def home(self) -> bytes | None:
        """Return the folder in the user's cache directory. Return None if there is none, or if the
        URL doesn't identify the data."""
        from penstock.cache.base import user_cache

        base, inode, origin = user_cache(), b"", self.origin
        if base is None or not origin.is_known_by_url:
            return None
        if origin.is_local and origin.folder:  # another disk may be mounted at its path later
            with contextlib.suppress(OSError):  # listing it raises the precise error
                inode = b"\0%d" % os.stat(origin.folder).st_ino
        return os.path.join(base, INDEXES, os.fsencode(self._key(inode)))

    def command(self, place: bytes | Origin) -> str:
        """Return the command that builds the index in a place again."""
        begin, cache = f"penstock index {self.origin.argument}", self.scratch.path
        if not isinstance(place, bytes):
            return f"{begin} --out {shlex.quote(place.url)}"
        if self._named is None and cache is not None and place == self._temporary():
            return f"{begin} --cache {shlex.quote(cache)}"
        return begin if place == self.home() else f"{begin} --out {shlex.quote(printable(place))}"

    @cached_property
    def _named(self) -> bytes | None:
        """The local path in `index`, or None if it is a URL."""
        if self.index is None:
            return None
        path = local_path(os.fspath(self.index))
        if path is None and self.origin.is_local:
            raise ConfigError(
                f"index: got {show(self.index)} for {self.origin.url}, wanted a local folder for "
                "the index of local data."
            )
        if path == b"" or (path is not None and b"\0" in path):
            raise ConfigError(f"index: got {self.index!r}, wanted a folder.")
        return None if path is None else os.path.abspath(path)

    def _check_outside(self, place: bytes) -> None:
        """Raise ConfigError for an `index=` inside a local dataset, where the index's folders would
        be taken for classes."""
        root = self.origin.folder
        if not self.origin.is_local or not root or self.origin.selection is not None:
            return
        path = os.path.relpath(os.path.realpath(place), os.path.realpath(root))
        parts = path.split(os.sep.encode())
        if parts[0] != b".." and not any(is_passed_over(p) for p in parts if p != b"."):
            raise ConfigError(
                f"index: {printable(place)} is inside the dataset's folder, where it would be "
                "taken for samples and classes. Give a folder outside of it; or leave index= out, "
                "and the index is stored next to the dataset."
            )

    def _key(self, more: bytes = b"") -> str:
        """Return a key of the data from its URL and store."""
        named = self.origin.key.encode("utf-8", "surrogateescape")
        return hashlib.sha256(named + more).hexdigest()[:32]

    def _temporary(self) -> bytes:
        """Return the index's folder in the cache folder, or a temporary one."""
        return self.scratch.index_folder(self._key())

    def make(self) -> bytes:
        """Make the first writable folder and return it. Warn if it is a temporary one. Raises
        WriteError, ConfigError."""
        if self.index is not None:
            self._check_outside(self.candidates()[0])
        place = next((p for p in self.candidates() if self.can_write(p)), None)
        if place is not None:
            with contextlib.suppress(OtherVersionError):  # that index is replaced
                read_index(place)  # raises ConfigError for a pack's own folder
            return place
        if self.index is not None:
            make_folder(self.candidates()[0])  # raises the precise error
        place = self._temporary()
        make_folder(place)
        if not self.scratch.is_kept:
            warnings.warn(
                f"{self.origin.url}: neither the folder next to it nor the user's cache directory "
                "is writable, so its index isn't kept. Pass a writable folder as index= or cache=, "
                "or run `penstock index` with --out.",
                PenstockWarning,
                stacklevel=6,
            )
        return place

    def can_write(self, place: bytes) -> bool:
        """Return True if this process can write to a place. Creates its folder."""
        from penstock.cache.base import make_private_folder

        try:
            if place == self.home():
                make_private_folder(os.fsdecode(place))
            os.makedirs(place, exist_ok=True)
            write_bytes(os.path.join(place, b"probe"), b"")
            os.unlink(os.path.join(place, b"probe"))
        except OSError:  # WriteError too
            return False
        return True

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of a remote dataset's index that lies apart from the data."""
        return self.remote_manifest or self.local_manifest

    @cached_property
    def local_manifest(self) -> Manifest | None:
        """The manifest of a remote dataset's index in a local folder; see `read_index`."""
        if self.origin.is_local:
            return None
        manifests = map(read_index, self.candidates())
        return next((manifest for manifest in manifests if manifest is not None), None)

    @cached_property
    def remote_manifest(self) -> Manifest | None:
        """The manifest of a remote dataset's index in a remote folder: the one that the user
        gave, or the one next to the data. For the one that the user gave, raises
        DatasetNotFoundError, ConfigError, FetchError and DatasetError."""
        place, is_named = self.remote(), self.index is not None
        if place is None:
            return None
        try:
            found = place.entry(MANIFEST)
            if found is not None:
                return _of_no_pack(read_manifest_of(place, found, remedy=REINDEX), place.url)
            if is_named:
                raise DatasetNotFoundError(
                    f"{place.url}: there is no index. Build it: penstock index {self.origin.url} "
                    f"--out {place.url}."
                )
        except (FetchError, DatasetError) as error:
            if is_named:
                raise
            if isinstance(error, OtherVersionError):
                text = f"{error} Until then, this process uses an index of its own."
                warnings.warn(text, PenstockWarning, stacklevel=6)
            else:  # the permission to read the data may not include the place next to it
                log.info("%s: no index can be read from this place (%s)", place.url, error)
        return None


def upload_index(built: Manifest, place: bytes, to: Origin) -> None:
    """Upload an index to a remote folder, the manifest last. Raises FetchError."""
    try:
        for name in (*built.names, QUARANTINE, MANIFEST):
            to.upload(os.path.join(place, name), name)
    except FetchError as error:
        raise FetchError(
            f"{error} The index is built, but can't be uploaded: run `penstock index` with "
            "--out FOLDER, a local folder, and pass that as index=.",
            uri=to.url,
        ) from None


class Sidecars:
    """Read the sidecars of one index. Thread-safe.

    url: of the data. place: their folder, local or remote. rebuild: rebuilds a damaged one of an
    index in a cache folder, or returns None if the data have changed; without it, damage is an
    error.
    """

    def __init__(
        self,
        manifest: Manifest,
        place: bytes | Origin,
        *,
        url: str = "",
        rebuild: Callable[[Manifest, int], Sidecar | None] | None = None,
    ) -> None:
        self._manifest, self.place, self._url, self._rebuild = manifest, place, url, rebuild
        self._lock = threading.Lock()
        self._unsaved: dict[int, Sidecar] = {}  # rebuilt ones that couldn't be written, by shard
        self._has_warned = False

    @property
    def shown(self) -> str:
        """Return the folder for messages."""
        return printable(self.place) if isinstance(self.place, bytes) else self.place.url

    def read(self, shard: int) -> Sidecar:
        """Read the sidecar of one shard, and rebuild it if that is possible. Raises
        CorruptShardError, IndexChangedError, FetchError."""
        manifest, place = self._manifest, self.place
        if isinstance(place, bytes):
            sidecar = self._read_local(shard, place)
        else:
            sidecar = self._read_remote(shard, place)
        wanted = int(manifest.samples[shard]), int(manifest.shard_bytes[shard])
        if (sidecar.samples, sidecar.size_bytes) != wanted:
            raise CorruptShardError(
                f"{printable(manifest.names[shard])}: this part of the index has "
                f"{sidecar.samples:,} samples and {sidecar.size_bytes:,} bytes, but the manifest "
                f"records {wanted[0]:,} and {wanted[1]:,}. {REINDEX}"
            )
        return sidecar

    def _parse(self, shard: int, path: bytes, url: str = "") -> Sidecar:
        manifest = self._manifest
        return read_sidecar(
            path,
            etag=manifest.etags[shard],
            layout=manifest.about.layout,
            is_file_per_sample=manifest.format.is_file_per_sample,
            url=url,
        )

    def _read_remote(self, shard: int, place: Origin) -> Sidecar:
        """Read a small object through the cache."""
        name = self._manifest.names[shard]
        url = f"{place.url.rstrip('/')}/{printable(name)}"

        def parse(path: bytes) -> Sidecar:
            try:
                return self._parse(shard, path, url)
            except (CorruptShardError, IndexChangedError) as error:  # damaged or missing
                self._warn(place.url, error)
                raise

        # The version is the fingerprint, because another index has other sidecars.
        return place.load(name, parse, size_bytes=None, version=self._manifest.about.fingerprint)

    def _read_local(self, shard: int, place: bytes) -> Sidecar:
        def read() -> Sidecar:
            if (unsaved := self._unsaved.get(shard)) is not None:
                return unsaved
            return self._parse(shard, below(place, self._manifest.names[shard]))

        try:
            return read()
        except (CorruptShardError, IndexChangedError, ReadError) as error:
            if self._rebuild is None or is_shortage(error):
                raise
        with self._lock:
            try:
                return read()  # the previous holder of the lock may have written it
            except (CorruptShardError, IndexChangedError, ReadError) as error:
                log.info("A part of the index is rebuilt: %s", error)
                self._warn(self._url, error)
            sidecar = self._rebuild(self._manifest, shard)
            if sidecar is None:
                raise IndexChangedError(
                    f"{self.shown}/{printable(self._manifest.names[shard])}: this part of the "
                    f"index can't be used, and it can't be rebuilt, because {self._url} has "
                    f"changed since it was indexed. Open the dataset again, or: {REINDEX}"
                )
            if not self._put_back(shard, sidecar, place):
                self._unsaved[shard] = sidecar
            return sidecar

    def _warn(self, url: str, error: Exception) -> None:
        """Warn once that a part of an index in the cache was damaged."""
        if not self._has_warned:
            self._has_warned = True
            cause = str(error).removesuffix(REOPEN).removesuffix(REINDEX).rstrip()
            warnings.warn(
                f"{url}: a part of its index in the cache can't be used. It is fetched or "
                f"rebuilt, and the job continues. {cause}",
                PenstockWarning,
                stacklevel=6,
            )

    def _put_back(self, shard: int, sidecar: Sidecar, place: bytes) -> bool:
        """Write the part back into the folder and return True on success. Don't wait for a process
        that is building an index there. An index of other data has other names of parts."""
        try:
            path = below(place, self._manifest.names[shard])
            make_folder(os.path.join(place, SIDECARS))
            with locked(place, busy="an index is being built there"):
                return sidecar.write(path) == self._manifest.etags[shard]
        except (CorruptShardError, OSError) as error:
            log.info("The rebuilt part of the index stays in memory: %s", error)
            return False
