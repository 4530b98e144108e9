"""Building the index of a set of tar files: each image decoded once, facts kept by archive."""

from __future__ import annotations

import itertools
import logging
import os
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import DatasetNotFoundError
from penstock.readers.fields.facts import ShardFacts, shard_facts
from penstock.readers.fields.sniff import is_progressive
from penstock.readers.fields.verify import Checked, examine
from penstock.readers.files.atomic import make_folder, write_bytes
from penstock.readers.files.progress import Reporter
from penstock.readers.formats.folder.building import SIDECARS, sweep_sidecars
from penstock.readers.formats.tar.intake import read_tar_chunks
from penstock.readers.formats.tar.listing import list_samples
from penstock.readers.formats.tar.shard import TarSidecar, write_tar_sidecar
from penstock.readers.index.manifest import MANIFEST, Manifest, join_manifest, write_manifest
from penstock.readers.origin.quarantine import (
    QUARANTINE,
    QuarantineEntry,
    nothing_decodes,
    quarantine_lines,
)
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats.tar.listing import TarListing
    from penstock.readers.origin.origin import Entry, Origin
    from penstock.readers.types import Progress, Verify

_log = logging.getLogger("penstock")


def build_tar_index(
    origin: Origin,
    listing: TarListing,
    folder: bytes,
    *,
    verify: Verify,
    workers: int,
    progress: Progress | None = None,
) -> Manifest:
    """Check every image and write sidecars, quarantine and, last, the manifest into `folder`.

    Raises DatasetNotFoundError if nothing decodes, WriteError, and what reading raises.
    """
    make_folder(os.path.join(folder, SIDECARS))
    reporter = Reporter(
        f"Indexing {origin.url}",
        total=len(listing.names),
        progress=progress,
        remedy="This is done once; `penstock index` does it before the job.",
    )
    # As in a folder's index: who has the old manifest open never reads new sidecars as the old.
    generation = listing.fingerprint()[:16].encode()
    quarantined = list(listing.quarantined)
    names: list[bytes] = []
    etags: list[str] = []
    facts: list[ShardFacts] = []
    for number, positions, results, progressive in _judged(
        origin, listing, verify, workers, reporter
    ):
        good = [i for i, result in enumerate(results) if isinstance(result, Checked)]
        quarantined += (
            QuarantineEntry(name=listing.shown(position), reason=result.reason)
            for position, result in zip(positions.tolist(), results, strict=True)
            if isinstance(result, Rejection)
        )
        if not good:
            continue
        checked = [result for result in results if isinstance(result, Checked)]
        content = _sidecar(listing, number, positions[good], checked)
        # The archive's identity names its blob in a cache: processes agree by the manifest alone.
        identity = content.archive.identity.encode()
        name = b"%s/%s-%06d-%s.arrow" % (SIDECARS, generation, len(names), identity)
        etags.append(write_tar_sidecar(os.path.join(folder, name), content))
        names.append(name)
        facts.append(_facts(content, progressive))
    write_bytes(os.path.join(folder, QUARANTINE), quarantine_lines(quarantined))
    if not names:
        raise DatasetNotFoundError(nothing_decodes(origin.url, quarantined))
    manifest = join_manifest(
        names,
        facts,
        etags=etags,
        kind="tar",
        classes=(),
        quarantined=len(quarantined),
        source=origin.url,
        listing=listing.fingerprint(),
        passed_over=listing.passed_over,
    )
    write_manifest(os.path.join(folder, MANIFEST), manifest)
    sweep_sidecars(folder, keep=set(names))
    _log.info(
        "Indexed %s: %d samples in %d archives, %d quarantined, %.1f s",
        origin.url,
        manifest.about.samples,
        len(names),
        len(quarantined),
        reporter.seconds,
    )
    return manifest


def judge_archive(
    origin: Origin, archives: Sequence[Entry], number: int, *, verify: Verify, workers: int
) -> tuple[TarSidecar, ShardFacts] | None:
    """One archive's sidecar, as build_tar_index makes it of these archives; None if it has no
    samples. Raises what reading raises."""
    listing = list_samples(origin, archives, workers=workers, warns=False)
    start, end = listing.bounds[number : number + 2].tolist()
    positions = np.arange(start, end, dtype=np.int64)
    results: list[Checked | Rejection] = []
    for chunk in read_tar_chunks(origin, listing, iter([(number, positions)]), workers=workers):
        results += examine(chunk.samples, verify)
    good = [i for i, result in enumerate(results) if isinstance(result, Checked)]
    if not good:
        return None
    checked = [result for result in results if isinstance(result, Checked)]
    content = _sidecar(listing, number, positions[good], checked)
    return content, _facts(content, 0)


def _judged(
    origin: Origin, listing: TarListing, verify: Verify, workers: int, reporter: Reporter
) -> Iterator[tuple[int, NDArray[np.int64], list[Checked | Rejection], int]]:
    """(archive, positions, results, progressive JPEGs) of each archive with samples, in order."""
    bounds = listing.bounds.tolist()
    jobs = [
        (number, np.arange(start, end, dtype=np.int64))
        for number, (start, end) in enumerate(itertools.pairwise(bounds))
        if end > start
    ]
    chunks = read_tar_chunks(origin, listing, iter(jobs), workers=workers)
    for number, positions in jobs:
        results: list[Checked | Rejection] = []
        progressive = 0
        while len(results) < len(positions):
            chunk = next(chunks)
            verdicts = examine(chunk.samples, verify)
            results += verdicts
            for sample, verdict in zip(chunk.samples, verdicts, strict=True):
                if not isinstance(sample, Rejection) and isinstance(verdict, Checked):
                    progressive += is_progressive(sample)
            reporter.done(len(chunk.positions), int(listing.sizes[chunk.positions].sum()))
        yield number, positions, results, progressive


def _sidecar(
    listing: TarListing, number: int, positions: NDArray[np.int64], checked: Sequence[Checked]
) -> TarSidecar:
    facts = [c.facts for c in checked]
    return TarSidecar(
        archive=listing.archives[number],
        names=[listing.names[i] for i in positions.tolist()],
        keys=[listing.keys[i] for i in positions.tolist()],
        starts=listing.starts[positions],
        sizes=listing.sizes[positions],
        crcs=np.array([c.crc32c for c in checked], np.uint32),
        heights=np.array([f.height for f in facts], np.int32),
        widths=np.array([f.width for f in facts], np.int32),
        channels=np.array([f.channels for f in facts], np.int32),
        codecs=[f.codec for f in facts],
        labels=None if listing.labels is None else listing.labels[positions],
    )


def _facts(content: TarSidecar, progressive: int) -> ShardFacts:
    return shard_facts(
        size_bytes=content.archive.size_bytes,
        crcs=content.crcs,
        heights=content.heights,
        widths=content.widths,
        channels=content.channels.tolist(),
        codecs=content.codecs,
        labels=content.labels,
        progressive=progressive,
    )
