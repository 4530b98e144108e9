"""Building the index of an image folder: each file read and decoded once, facts kept by shard."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from penstock.cache.errors import DatasetNotFoundError
from penstock.readers.fields.facts import ShardFacts, shard_facts
from penstock.readers.fields.verify import Checked, examine
from penstock.readers.files.atomic import make_folder, write_bytes
from penstock.readers.files.progress import Reporter
from penstock.readers.formats.folder.intake import read_chunks
from penstock.readers.formats.folder.listing import virtual_shards
from penstock.readers.formats.folder.shard import SidecarContent, read_sidecar, write_sidecar
from penstock.readers.index.manifest import MANIFEST, Manifest, join_manifest, write_manifest
from penstock.readers.origin.quarantine import (
    QUARANTINE,
    QuarantineEntry,
    nothing_decodes,
    quarantine_lines,
)
from penstock.readers.types import ImageFacts, Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats.folder.intake import Chunk
    from penstock.readers.formats.folder.listing import Listing
    from penstock.readers.origin.origin import Entry, Origin
    from penstock.readers.types import Progress, Verify

_log = logging.getLogger("penstock")

SIDECARS = b"sidecars"
_SIDECAR = re.compile(rb"[0-9a-f]{16}-\d{6,}(-[0-9a-f]{32})?\.arrow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What an earlier index says of a file."""

    size_bytes: int
    mtime_ns: int
    version: str
    checked: Checked

    def is_same(self, file: Entry) -> bool:
        """Nothing about the file looks different: its facts hold without reading it."""
        here = (self.size_bytes, self.mtime_ns, self.version)
        return here == (file.size_bytes, file.mtime_ns, file.version)


def build_folder_index(
    origin: Origin,
    listing: Listing,
    folder: bytes,
    *,
    verify: Verify,
    workers: int,
    known: Mapping[bytes, Known],
    progress: Progress | None = None,
) -> Manifest:
    """Check every candidate and write sidecars, quarantine and, last, the manifest into `folder`.

    known: facts of an earlier index by name; files that didn't change since aren't decoded again.
    Raises DatasetNotFoundError if nothing decodes, WriteError, and what reading raises.
    """
    make_folder(os.path.join(folder, SIDECARS))
    reporter = Reporter(
        f"Indexing {origin.url}",
        total=len(listing.files),
        progress=progress,
        remedy="This is done once; `penstock index` does it before the job.",
    )
    # A generation of its own name: a process that has the old manifest open never reads new
    # sidecars as if they were the old ones.
    generation = listing.fingerprint()[:16]
    quarantined = list(listing.quarantined)
    names: list[bytes] = []
    etags: list[str] = []
    facts: list[ShardFacts] = []
    for positions, results in _judged(origin, listing, known, verify, workers, reporter):
        good = [i for i, result in enumerate(results) if isinstance(result, Checked)]
        quarantined += _quarantined(listing, positions, results)
        if not good:
            continue
        content = _sidecar(listing, positions[good], [r for r in results if isinstance(r, Checked)])
        name = b"%s/%s-%06d.arrow" % (SIDECARS, generation.encode(), len(names))
        etags.append(write_sidecar(os.path.join(folder, name), content))
        names.append(name)
        facts.append(_facts(content))
    lines = quarantine_lines(quarantined)
    write_bytes(os.path.join(folder, QUARANTINE), lines)
    if not names:
        raise DatasetNotFoundError(nothing_decodes(origin.url, quarantined))
    directories = tuple((os.fsdecode(k), v) for k, v in sorted(listing.directories.items()))
    manifest = join_manifest(
        names,
        facts,
        etags=etags,
        kind="folder",
        classes=listing.classes,
        quarantined=len(quarantined),
        directories=directories,
        listing=listing.fingerprint(),
        passed_over=listing.passed_over,
    )
    write_manifest(os.path.join(folder, MANIFEST), manifest)
    sweep_sidecars(folder, keep=set(names))
    _log.info(
        "Indexed %s: %d samples in %d shards, %d quarantined, %.1f s",
        origin.url,
        manifest.about.samples,
        len(names),
        len(quarantined),
        reporter.seconds,
    )
    return manifest


def judge_shard(
    origin: Origin,
    listing: Listing,
    positions: NDArray[np.int64],
    *,
    verify: Verify,
    workers: int,
) -> tuple[SidecarContent, ShardFacts] | None:
    """One virtual shard's sidecar, as build_folder_index makes it; None if nothing of it decodes.
    Raises what reading raises."""
    results: list[Checked | Rejection] = []
    for chunk in read_chunks(origin, listing, iter([(0, positions)]), workers=workers):
        results += examine(chunk.samples, verify)
    good = [i for i, result in enumerate(results) if isinstance(result, Checked)]
    if not good:
        return None
    content = _sidecar(listing, positions[good], [r for r in results if isinstance(r, Checked)])
    return content, _facts(content)


def known_files(manifest: Manifest, folder: bytes) -> dict[bytes, Known]:
    """What an index says of its files, by name. Raises what read_sidecar raises."""
    known: dict[bytes, Known] = {}
    for shard, name in enumerate(manifest.names):
        sidecar = read_sidecar(os.path.join(folder, name), etag=manifest.etags[shard])
        known |= _known_of(sidecar)
    return known


def _known_of(content: SidecarContent) -> Iterator[tuple[bytes, Known]]:
    columns = zip(
        content.names,
        content.sizes.tolist(),
        content.mtimes_ns.tolist(),
        content.versions,
        content.crcs.tolist(),
        content.heights.tolist(),
        content.widths.tolist(),
        content.channels.tolist(),
        content.codecs,
        strict=True,
    )
    for name, size_bytes, mtime_ns, version, crc, height, width, channels, codec in columns:
        facts = ImageFacts(height=height, width=width, channels=channels, codec=codec)
        checked = Checked(crc32c=crc, facts=facts)
        yield (
            name,
            Known(size_bytes=size_bytes, mtime_ns=mtime_ns, version=version, checked=checked),
        )


def _judged(
    origin: Origin,
    listing: Listing,
    known: Mapping[bytes, Known],
    verify: Verify,
    workers: int,
    reporter: Reporter,
) -> Iterator[tuple[NDArray[np.int64], list[Checked | Rejection]]]:
    """(positions, results) of each virtual shard, in order."""
    shards = virtual_shards(listing)
    old = {
        i: known[file.name]
        for i, file in enumerate(listing.files)
        if file.name in known and known[file.name].size_bytes == file.size_bytes
    }
    same = {i: k.checked for i, k in old.items() if k.is_same(listing.files[i])}
    if known:
        _log.info(
            "The folder changed: %d files as before, %d new or changed, %d gone",
            len(same),
            len(listing.files) - len(same),
            len(known.keys() - {file.name for file in listing.files}),
        )
    fresh = [
        np.array([i for i in shards.positions(s).tolist() if i not in same], np.int64)
        for s in range(shards.shards)
    ]
    chunks = read_chunks(origin, listing, iter(enumerate(fresh)), workers=workers)
    for shard in range(shards.shards):
        results: dict[int, Checked | Rejection] = {}
        while len(results) < len(fresh[shard]):
            chunk = next(chunks)
            results |= zip(chunk.positions.tolist(), _check(chunk, old, verify), strict=True)
            reporter.done(len(chunk.positions), int(listing.sizes[chunk.positions].sum()))
        positions = shards.positions(shard)
        kept = len(positions) - len(results)
        reporter.done(kept, 0)
        yield positions, [same.get(i) or results[i] for i in positions.tolist()]


def _check(chunk: Chunk, old: Mapping[int, Known], verify: Verify) -> list[Checked | Rejection]:
    """Decode what is new; a copied or touched file with the bytes it had is known."""
    results: dict[int, Checked | Rejection] = {}
    unknown: list[int] = []
    for i, position in enumerate(chunk.positions.tolist()):
        sample, before = chunk.samples[i], old.get(position)
        if before and not isinstance(sample, Rejection) and crc32c(sample) == before.checked.crc32c:
            results[i] = before.checked
        else:
            unknown.append(i)
    verdicts = examine([chunk.samples[i] for i in unknown], verify)
    results |= zip(unknown, verdicts, strict=True)
    return [results[i] for i in range(len(chunk.samples))]


def _quarantined(
    listing: Listing, positions: NDArray[np.int64], results: Sequence[Checked | Rejection]
) -> list[QuarantineEntry]:
    return [
        QuarantineEntry(name=listing.files[i].name, reason=result.reason)
        for i, result in zip(positions.tolist(), results, strict=True)
        if isinstance(result, Rejection)
    ]


def _sidecar(
    listing: Listing, positions: NDArray[np.int64], checked: Sequence[Checked]
) -> SidecarContent:
    files = [listing.files[i] for i in positions.tolist()]
    facts = [c.facts for c in checked]
    return SidecarContent(
        names=[file.name for file in files],
        sizes=listing.sizes[positions],
        mtimes_ns=np.array([file.mtime_ns for file in files], np.int64),
        versions=[file.version for file in files],
        crcs=np.array([c.crc32c for c in checked], np.uint32),
        heights=np.array([f.height for f in facts], np.int32),
        widths=np.array([f.width for f in facts], np.int32),
        channels=np.array([f.channels for f in facts], np.int32),
        codecs=[f.codec for f in facts],
        labels=None if listing.labels is None else listing.labels[positions],
    )


def _facts(content: SidecarContent) -> ShardFacts:
    return shard_facts(
        size_bytes=int(content.sizes.sum()),
        crcs=content.crcs,
        heights=content.heights,
        widths=content.widths,
        channels=content.channels.tolist(),
        codecs=content.codecs,
        labels=content.labels,
    )


def sweep_sidecars(folder: bytes, *, keep: set[bytes]) -> None:
    """Remove sidecars of earlier generations and what a killed build left."""
    sidecars = os.path.join(folder, SIDECARS)
    for name in os.listdir(sidecars):
        ours = _SIDECAR.fullmatch(name.removeprefix(b".").removesuffix(b".tmp"))
        if ours and SIDECARS + b"/" + name not in keep:
            os.unlink(os.path.join(sidecars, name))


def refresh_directories(manifest: Manifest, listing: Listing, folder: bytes) -> Manifest:
    """The same index with the folders' new times: nothing that counts had changed."""
    directories = tuple((os.fsdecode(k), v) for k, v in sorted(listing.directories.items()))
    about = replace(manifest.about, directories=directories, listing=listing.fingerprint())
    fresh = replace(manifest, about=about)
    write_manifest(os.path.join(folder, MANIFEST), fresh)
    return fresh
