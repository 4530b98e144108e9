"""The index of an open dataset: what is there, shard by shard.

Sample id = position in the index; it never changes while the index stands.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.fields.arrays import array_form
from penstock.readers.fields.selection import image_fields
from penstock.readers.files.names import OWN_FOLDER, printable
from penstock.readers.index.shards import Shards
from penstock.readers.index.sidecars import Sidecars
from penstock.readers.origin.quarantine import QUARANTINE, noted_left_out
from penstock.readers.types import ANY_SIZE, MAX_PIXELS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from penstock.cache.blobs.remote import Remote
    from penstock.readers.fields.schema import Schema
    from penstock.readers.formats.format import Format
    from penstock.readers.formats.layout import Layout
    from penstock.readers.formats.summary import FieldSummary
    from penstock.readers.index.about import About
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.index.mending import Mender
    from penstock.readers.origin.origin import Origin
    from penstock.readers.origin.quarantine import LeftOut
    from penstock.readers.origin.remote import RemoteFolder
    from penstock.readers.origin.scratch import Scratch
    from penstock.readers.types import ImageRange

_MOST_PIXELS = 2**30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Index:
    """What a dataset holds; the sample of a shard's row has the id starts[shard] + row.

    sizes: samples a shard; starts: id of a shard's first sample; shard_bytes: bytes to read a
    shard, of chunks those of the fields that are kept; all int64, shape (shards,), no shard empty.
    icc: label correlation inside a shard, None without labels (see
    `index.totals.label_correlation`). fingerprint: of the content, not of where it lies.
    quarantined: files that aren't in it. place: where the manifest is, for people. shards: opens
    them. scratch: kept alive as long as the index. read_quarantine: the bytes of its
    quarantine.jsonl; raises OSError, PenstockError where there is none.
    """

    url: str
    place: str
    sizes: NDArray[np.int64]
    starts: NDArray[np.int64]
    shard_bytes: NDArray[np.int64]
    manifest: Manifest
    shards: Shards
    origin: Origin
    scratch: Scratch
    read_quarantine: Callable[[], bytes]

    @property
    def about(self) -> About:
        """The facts that hold for all shards."""
        return self.manifest.about

    @property
    def format(self) -> Format:
        """The format in which the dataset lies in storage."""
        return self.manifest.format

    @property
    def kind(self) -> str:
        """The name of the format, for people."""
        return self.about.kind

    @property
    def is_self_contained(self) -> bool:
        """Whether the dataset carries this index itself, as a pack does: none was built."""
        return self.format.indexing is None

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return self.about.samples

    @property
    def files(self) -> int:
        """How many files or objects the samples lie in."""
        return int(self.manifest.files.sum())

    @property
    def schema(self) -> Schema:
        """The fields that a sample has, by name and in order, its number left out."""
        return self.about.schema

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields, in order."""
        return tuple(self.about.schema)

    @property
    def layout(self) -> Layout:
        """How the samples are stored."""
        return self.about.layout

    @property
    def images(self) -> dict[str, ImageRange]:
        """Bounds of the oriented heights and widths, of each field of images; in chunks any, as
        nobody looks at them before they are read."""
        found = {}
        for name in image_fields(self.schema, self.schema):
            summary = self.summary(name)
            range = summary.images or (ANY_SIZE if summary.storage == "chunks" else None)
            if range is not None:
                found[name] = range
        return found

    @property
    def longest(self) -> dict[str, int]:
        """The largest first length of each field whose samples differ in it, where it is known."""
        found = {}
        for name, type in self.schema.items():
            form, told = array_form(type), self.summary(name).lengths
            if form is not None and form.is_ragged and form.shape[0] is None and told:
                found[name] = told[0][1]
        return found

    def summary(self, field: str) -> FieldSummary:
        """What is known of one field, over all samples."""
        return self.about.fields[field]

    @property
    def units(self) -> list[NDArray[np.int64]] | None:
        """Rows of each decode unit, by shard; None where every sample can be had alone."""
        if not any(self.manifest.units):
            return None
        return [self.manifest.units_of(shard) for shard in range(len(self.sizes))]

    @property
    def lacking(self) -> dict[str, int]:
        """How many samples lack a field, of the fields that some lack."""
        return {name: each.missing for name, each in self.about.fields.items() if each.missing}

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the only field of classes, by number; empty where there is none."""
        return self.about.classes

    @property
    def fingerprint(self) -> str:
        return self.about.fingerprint

    @property
    def icc(self) -> float | None:
        return self.about.icc

    @property
    def shuffled(self) -> bool:
        return self.about.shuffled

    @property
    def seed(self) -> int | None:
        return self.about.seed

    @property
    def max_pixels(self) -> int:
        """Pixels of the largest image or mask, as a pack says; a manifest may come from anybody."""
        told = self.about.settings.get("max_pixels")
        return min(told, _MOST_PIXELS) if type(told) is int and told > 0 else MAX_PIXELS

    @property
    def quarantined(self) -> int:
        return self.about.quarantined

    def left_out(self) -> Mapping[str, LeftOut]:
        """The samples that are left out, by reason; see `noted_left_out`."""
        return noted_left_out(
            self.about.samples_left_out, self.quarantined, self.read_quarantine, place=self.place
        )

    @property
    def remote(self) -> Remote | None:
        """What a remote dataset is read through; None for a local one."""
        return self.shards.remote

    def keeping(self, fields: tuple[str, ...]) -> Index:
        """The same index, of whose remote shards of chunks these fields' bytes alone are fetched
        ahead and kept."""
        if not self.manifest.is_of_chunks:
            return self
        return replace(
            self, shard_bytes=self.manifest.bytes_of(fields), shards=self.shards.keeping(fields)
        )

    def shard_name(self, shard: int) -> str:
        """The name of a shard's file, or of its part of the index, for people."""
        return printable(self.manifest.names[shard])


def index_of(
    manifest: Manifest,
    *,
    origin: Origin,
    place: bytes | RemoteFolder | None,
    scratch: Scratch,
    mender: Mender | None = None,
) -> Index:
    """Make an index from its manifest. place: where manifest and sidecars are, a local or a remote
    folder; None for a pack's own. scratch: kept alive as long as the index. mender: see
    Sidecars."""
    ends = np.cumsum(manifest.samples, dtype=np.int64)
    if place is None:
        shown = f"{origin.url}/{OWN_FOLDER.decode()}"
    else:
        shown = printable(place) if isinstance(place, bytes) else place.url

    def read_quarantine() -> bytes:
        path: bytes
        if isinstance(place, bytes):
            path = os.path.join(place, QUARANTINE)
        else:
            holder, name = origin, b"%s/%s" % (OWN_FOLDER, QUARANTINE)
            if place is not None:
                holder, name = place, QUARANTINE
            path = holder.file(name, size_bytes=None, version=manifest.about.fingerprint)
        with open(path, "rb") as file:
            return file.read()

    return Index(
        url=origin.url,
        place=shown,
        sizes=manifest.samples,
        starts=ends - manifest.samples,
        shard_bytes=manifest.shard_bytes,
        manifest=manifest,
        shards=Shards(origin, manifest, Sidecars(manifest, place, mender)),
        origin=origin,
        scratch=scratch,
        read_quarantine=read_quarantine,
    )
