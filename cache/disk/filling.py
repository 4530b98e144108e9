"""Filling blobs and publishing them: from reserved room to a whole file that everybody finds."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from penstock.cache.base.mapping import Map
from penstock.cache.base.trust import StrangeFileError
from penstock.cache.disk.block_crcs import crcs_of
from penstock.cache.disk.fill_marks import map_name, part_name
from penstock.cache.disk.fills import Fill, discard, fill_disk_bytes, map_bytes
from penstock.cache.disk.layout import allocated_bytes
from penstock.cache.disk.pieces import Pieces

if TYPE_CHECKING:
    from penstock.cache.base.blob import BlobSource
    from penstock.cache.base.locks import ReaderLocks
    from penstock.cache.disk.blob_table import BlobRow
    from penstock.cache.disk.catalogue import Catalogue
    from penstock.cache.disk.keys import KeyLocks
    from penstock.cache.disk.layout import Layout
    from penstock.cache.disk.reservations import Reservations


class Filling:
    """Filling begins fills, and makes whole blobs of them. readers: held by this process."""

    def __init__(
        self,
        layout: Layout,
        catalogue: Catalogue,
        *,
        keys: KeyLocks,
        readers: ReaderLocks,
        reservations: Reservations,
    ) -> None:
        self._layout, self._catalogue = layout, catalogue
        self._keys, self._readers = keys, readers
        self._reservations = reservations

    def begin(self, source: BlobSource, *, group: str, pinned: bool) -> tuple[Fill, Map] | None:
        """Open the fill of a blob, or make it; None if there is no room, or it is published by
        now. pinned: room is looked for even if there was none a moment ago. Raises OSError (the
        disk is full, …)."""
        key, pieces = source.key, Pieces(source)
        fills = self._layout.fills
        with self._keys.holding(key):
            if self._layout.blobs.has(key) or not pieces.size_bytes:
                return None
            try:
                fill = Fill(fills, key, pieces)
            except (FileNotFoundError, ValueError, StrangeFileError):
                disk_bytes = fill_disk_bytes(
                    pieces.size_bytes, pieces.count, most_map_bytes=map_bytes(pieces)
                )
                if not self._reservations.reserve(
                    source, group=group, disk_bytes=disk_bytes, insist=pinned
                ):
                    return None
                try:
                    fill = Fill.make(fills, key, pieces)
                except BaseException:
                    self._catalogue.blobs.remove(key)
                    raise
            try:
                return fill, self._map(fill)
            except BaseException:
                fill.close()
                raise

    def _map(self, fill: Fill) -> Map:
        readers, inode = self._readers, fill.inode
        # An evictor holds it only while it holds the key, which is ours.
        if not readers.hold(inode):
            raise BlockingIOError(f"{fill.part}: held by an evictor")
        try:
            return Map(fill.fd, on_unmap=lambda: readers.let_go(inode))
        except BaseException:
            readers.let_go(inode)
            raise

    def publish(self, source: BlobSource, fill: Fill, data: Any, *, group: str, kept: bool) -> None:
        """Make a blob whose pieces are all there a whole one. data: its map, as a buffer. Does
        nothing if another did."""
        key = source.key
        with self._keys.holding(key):
            fills = self._layout.fills
            try:
                if fills.stat(part_name(key)).st_ino != fill.inode or not fill.is_whole:
                    return
            except FileNotFoundError:
                return
            crcs = fill.block_crcs(memoryview(data))
            self._rename(key)
            fills.remove(map_name(key))
            self.enter(source, group=group, kept=kept, crcs=crcs)

    def put(self, source: BlobSource, data: memoryview, *, group: str, kept: bool) -> bool:
        """Keep a small whole object; the caller holds its key. False if there is no room."""
        disk_bytes = fill_disk_bytes(len(data), 1)
        if not len(data) or not self._reservations.reserve(
            source, group=group, disk_bytes=disk_bytes, insist=True, kept=kept
        ):
            return False
        fills = self._layout.fills
        try:
            discard(fills, source.key)
            with open(fills.create(part_name(source.key)), "wb") as file:
                os.posix_fallocate(file.fileno(), 0, len(data))
                file.write(data)
            crcs = crcs_of(data)
            self._rename(source.key)
        except BaseException:
            discard(fills, source.key)
            self._catalogue.blobs.remove(source.key)
            raise
        self.enter(source, group=group, kept=kept, crcs=crcs)
        return True

    def _rename(self, key: str) -> None:
        if self._layout.blobs.is_folder(key):  # nothing of ours
            self._layout.blobs.remove(key)
        self._layout.fills.rename(part_name(key), self._layout.blobs, key)

    def enter(self, source: BlobSource | BlobRow, *, group: str, kept: bool, crcs: bytes) -> None:
        """Write down that a blob is whole, and what it takes."""
        found = self._layout.blobs.stat(source.key)
        self._catalogue.blobs.add(
            source.key,
            group=group,
            uri=source.uri,
            size_bytes=found.st_size,  # an object's wasn't known
            disk_bytes=allocated_bytes(found),
            state="ready",
            kept=kept,
            crcs=crcs,
        )
