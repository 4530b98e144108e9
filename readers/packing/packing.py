"""Writing a pack: shards of a seeded full shuffle, every image decoded once, resumable at any
moment.

Each shard is written, renamed into place and then recorded; the manifest comes last, and until then
nothing can be read. What is in each shard follows from the source's names and sizes alone, so
killed runs and any number of ranks make byte-identical packs. (Packed shard by shard, a shard of
which no sample is good leaves a gap in the numbers; the manifest names the shards that are.)
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.base.limits import usable_cores
from penstock.cache.base.sizes import parse_size
from penstock.cache.errors import ConfigError, DatasetNotFoundError, PenstockError
from penstock.cache.threads import ordered
from penstock.readers.fields.facts import shard_facts
from penstock.readers.fields.sniff import is_progressive
from penstock.readers.fields.verify import Checked, find_verify
from penstock.readers.files.atomic import locked, make_folder, write_bytes
from penstock.readers.files.names import printable
from penstock.readers.files.progress import Reporter
from penstock.readers.formats.limits import VERSION
from penstock.readers.formats.pack.shard import ArrowShard, ShardContent, write_shard
from penstock.readers.index.manifest import (
    MANIFEST,
    Manifest,
    join_manifest,
    write_manifest,
)
from penstock.readers.index.opening import Opener, check_format
from penstock.readers.origin.local import LocalFolder
from penstock.readers.origin.locate import locate
from penstock.readers.origin.quarantine import (
    QUARANTINE,
    QuarantineEntry,
    nothing_decodes,
    quarantine_lines,
)
from penstock.readers.origin.scratch import Scratch
from penstock.readers.origin.urls import local_path, show
from penstock.readers.packing.parts import PackFolder, Part, shard_name
from penstock.readers.packing.source import FolderSource, PackedSource, TarSource
from penstock.readers.packing.transcode import Transcode
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from penstock.cache.disk.disk_cache import DiskCache
    from penstock.readers.index.opening import Folder, Format
    from penstock.readers.origin.origin import Origin
    from penstock.readers.origin.urls import Url
    from penstock.readers.packing.plan import PackPlan
    from penstock.readers.packing.source import Judged, PackSource
    from penstock.readers.types import Encoded, Progress, Verify

    _Pair = tuple[Encoded | Rejection, Checked | Rejection]

_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSummary:
    """What pack did. bytes: of the shard files. complete: the manifest is written; else the counts
    are of this rank's share, and other ranks have theirs to finish. progressive: JPEGs of that
    kind in the pack, None where nobody counted."""

    samples: int
    shards: int
    bytes: int
    quarantined: int
    seconds: float
    complete: bool
    progressive: int | None


def pack(
    src: Url,
    dst: Folder,
    *,
    format: Format = "auto",
    shuffle: bool = True,
    seed: int = 0,
    shard_bytes: int | str = "64MiB",
    short_side: int | None = None,
    quality: int | None = None,
    baseline: bool = False,
    workers: int | None = None,
    verify: Verify | None = None,
    rank: int = 0,
    size: int = 1,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any | None = None,
    cache: DiskCache | Folder | None = None,
) -> PackSummary:
    """Write a dataset as a pack into the local folder dst. Killed, the same call goes on.

    src: image folder, tar files or pack, local or behind a URL. format: which of them ("folder",
    "tar", "arrow") where src holds more than one kind. shuffle: False keeps the ids of the
    source's index. shard_bytes: mean bytes of a shard, counted before images are rewritten.
    short_side: images with a longer one are rewritten as baseline JPEGs of this short side (pixels,
    upright, quality 92 unless told); others stay as they are. quality: of what is rewritten, 1 to
    100; without short_side every image is rewritten at its size. baseline: other progressive JPEGs
    become baseline ones without loss (extra `transcode`). workers: threads, None is all cores.
    verify: decodes images, None finds the installed one. rank, size: this process's share of the
    shards; whoever sees all shards finished writes the manifest. progress: called as progress(done
    samples, total samples, done bytes). storage_options, filesystem: of src, as for Dataset. cache:
    what a remote src is read through; None keeps nothing.

    Raises DatasetNotFoundError (nothing there, or nothing decodes), DestinationError (dst holds
    other data; nothing was touched), ConfigError, IndexChangedError (a file changed meanwhile),
    DatasetError, FetchError, WriteError (disk full, read-only), MissingDependencyError.
    """
    began = time.monotonic()
    wanted_bytes = parse_size(shard_bytes, what="shard_bytes")
    transcode = Transcode(short_side=short_side, quality=quality, baseline=baseline)
    _check_share(rank, size)
    check_format(format)
    scratch = Scratch(cache)
    origin = locate(src, storage_options=storage_options, scratch=scratch, filesystem=filesystem)
    try:
        root = _destination(dst, origin)
        threads = workers or usable_cores()
        job = _Job(
            shuffle=shuffle,
            seed=seed,
            shard_bytes=wanted_bytes,
            transcode=transcode,
            workers=threads,
            verify=verify,
            rank=rank,
            size=size,
            progress=progress,
        )
        return job.run(_source(origin, scratch, format=format, workers=threads), root, began)
    finally:
        origin.close()
        scratch.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What `pack` was asked for, checked."""

    shuffle: bool
    seed: int
    shard_bytes: int
    transcode: Transcode
    workers: int
    verify: Verify | None
    rank: int
    size: int
    progress: Progress | None

    def run(self, source: PackSource, root: bytes, began: float) -> PackSummary:
        settings = {
            "version": VERSION,
            "source": source.fingerprint,
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else None,
            "shard_bytes": self.shard_bytes,
            **self.transcode.settings(),
        }
        folder = PackFolder(root, settings)
        manifest = folder.finished()
        if manifest is not None:
            _log.info("%s is this very pack already, complete: nothing to do", printable(root))
            with locked(folder.own):
                folder.tidy()
            return _summary(manifest, began)
        packer = _Packer(
            source=source,
            plan=source.plan(shuffle=self.shuffle, seed=self.seed, shard_bytes=self.shard_bytes),
            folder=folder,
            verify=None if source.has_ids else self.verify or find_verify(workers=self.workers),
            transcode=self.transcode,
            workers=self.workers,
            progress=self.progress,
        )
        folder.begin()
        own = os.path.join(folder.own, b"ranks", b"%06d-of-%06d" % (self.rank, self.size))
        make_folder(own)
        busy = (
            f"{printable(root)}: another process is packing into it. Wait for it, or end it first."
        )
        with locked(own, busy=busy):
            parts = packer.work(range(self.rank, packer.shards, self.size))
        manifest = packer.finish()
        return _share(parts, began) if manifest is None else _summary(manifest, began)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """A shard's samples, good and bad, before it is written."""

    shard: int
    positions: NDArray[np.int64]
    samples: list[Encoded | Rejection]
    results: list[Checked | Rejection]
    names: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packer:
    source: PackSource
    plan: PackPlan
    folder: PackFolder
    verify: Verify | None
    transcode: Transcode
    workers: int
    progress: Progress | None

    @property
    def shards(self) -> int:
        return self.plan.shards.shards

    def work(self, mine: range) -> list[Part]:
        """Write the shards of one rank that aren't finished; returns the records of all of them."""
        self.folder.sweep(mine)
        parts = {shard: self.folder.read_part(shard) for shard in mine}
        positions = {shard: self.plan.shards.positions(shard) for shard in mine}
        reporter = Reporter(
            f"Packing {self.source.url}",
            total=sum(len(p) for p in positions.values()),
            progress=self.progress,
            remedy="`penstock pack` shows a progress bar.",
        )
        left = [shard for shard, part in parts.items() if part is None]
        done = [positions[shard] for shard, part in parts.items() if part is not None]
        if done:
            _log.info("Going on after %d finished shards of %d", len(done), len(mine))
            ready = np.concatenate(done)
            reporter.done(len(ready), int(self.source.sizes[ready].sum()))
        made = self._made(left, reporter)
        # One thread writes a shard while the next one is decoded.
        written = ordered(self._write, made, workers=1, ahead=1, name="pack-write", leave_s=None)
        parts |= zip(left, written, strict=True)
        return [part for part in parts.values() if part is not None]

    def _made(self, shards: list[int], reporter: Reporter) -> Iterator[_Made]:
        jobs = ((shard, self.plan.shards.positions(shard)) for shard in shards)
        judged = self.source.judged(jobs, verify=self.verify, workers=self.workers)
        for shard in shards:
            positions = self.plan.shards.positions(shard)
            samples: list[Encoded | Rejection] = []
            results: list[Checked | Rejection] = []
            names: list[bytes] = []
            while len(samples) < len(positions):
                some = next(judged)
                names += some.names
                for sample, result in self._transcoded(some):
                    samples.append(sample)
                    results.append(result)
                reporter.done(len(some.positions), int(self.source.sizes[some.positions].sum()))
            yield _Made(
                shard=shard, positions=positions, samples=samples, results=results, names=names
            )

    def _transcoded(self, some: Judged) -> Iterator[_Pair]:
        pairs = zip(some.samples, some.results, strict=True)
        if not self.transcode.is_needed:
            return iter(pairs)
        return ordered(
            self._transcode, pairs, workers=self.workers, ahead=self.workers + 2, name="transcode"
        )

    def _transcode(self, pair: _Pair) -> _Pair:
        sample, result = pair
        if isinstance(sample, Rejection) or isinstance(result, Rejection):
            return pair
        return self.transcode.apply(sample, result)

    def _write(self, made: _Made) -> Part:
        good = np.array([isinstance(r, Checked) for r in made.results], bool)
        content = self._content(made, made.positions[good]) if good.any() else None
        facts = None
        if content is not None:
            size_bytes = write_shard(self.folder.shard(made.shard), content)
            facts = shard_facts(
                size_bytes=size_bytes,
                crcs=content.crcs,
                heights=content.heights,
                widths=content.widths,
                channels=content.channels.tolist(),
                codecs=content.codecs,
                labels=content.labels,
                progressive=sum(map(is_progressive, content.images)),
                overhead_bytes=size_bytes - sum(map(len, content.images)),
            )
        rejected = [
            (
                int(self.plan.source_ids[position]),
                QuarantineEntry(name=self.source.name(position), reason=result.reason),
            )
            for position, result in zip(made.positions.tolist(), made.results, strict=True)
            if isinstance(result, Rejection)
        ]
        part = Part(facts=facts, rejected=rejected)
        self.folder.write_part(made.shard, part)
        return part

    def _content(self, made: _Made, positions: NDArray[np.int64]) -> ShardContent:
        checked = [r for r in made.results if isinstance(r, Checked)]
        pairs = zip(made.samples, made.results, strict=True)
        images = [s for s, r in pairs if isinstance(r, Checked) and not isinstance(s, Rejection)]
        labels = self.source.labels
        return ShardContent(
            images=images,
            heights=np.array([c.facts.height for c in checked], np.int32),
            widths=np.array([c.facts.width for c in checked], np.int32),
            channels=np.array([c.facts.channels for c in checked], np.int32),
            codecs=[c.facts.codec for c in checked],
            crcs=np.array([c.crc32c for c in checked], np.uint32),
            source=self.plan.source_ids[positions],
            labels=None if labels is None else labels[positions],
            names=[
                name
                for name, result in zip(made.names, made.results, strict=True)
                if isinstance(result, Checked)
            ],
        )

    def finish(self) -> Manifest | None:
        """Write the manifest if every shard of every rank is finished; else None."""
        with locked(self.folder.own):
            try:
                done = self.folder.finished()
                return done if done is not None else self._finish()
            except (PenstockError, FileNotFoundError):
                # Without locks (some NFS) two ranks may finish at once, and one tidies up under the
                # other: fine if the result stands.
                if (done := self.folder.finished()) is not None:
                    return done
                raise

    def _finish(self) -> Manifest | None:
        parts = []
        for shard in range(self.shards):
            part = self.folder.read_part(shard)
            if part is None:
                return None
            parts.append(part)
        rejected = [r for part in parts for r in part.rejected]
        quarantined = [*self.source.quarantined, *(q for _, q in rejected)]
        write_bytes(os.path.join(self.folder.own, QUARANTINE), quarantine_lines(quarantined))
        good = [(k, part.facts) for k, part in enumerate(parts) if part.facts is not None]
        if not good:
            raise DatasetNotFoundError(nothing_decodes(self.source.url, quarantined))
        if rejected:
            self._close_gaps(parts, np.sort(np.array([i for i, _ in rejected], np.int64)))
        settings = self.folder.settings
        manifest = join_manifest(
            [shard_name(shard) for shard, _ in good],
            [facts for _, facts in good],
            kind="arrow",
            classes=self.source.classes,
            quarantined=len(quarantined),
            shuffled=settings["shuffle"],
            seed=settings["seed"],
            source=self.source.url,
            settings=settings,
        )
        write_manifest(os.path.join(self.folder.own, MANIFEST), manifest)
        self.folder.tidy()
        return manifest

    def _close_gaps(self, parts: list[Part], rejected: NDArray[np.int64]) -> None:
        """Turn the `source` columns into ids of the source's index, which counts good files only.

        Which files are bad is known only now. The column is computed from the plan, not from what
        is there, so doing it twice does no harm.
        """
        for shard, part in enumerate(parts):
            if part.facts is None:
                continue
            ids = self.plan.source_ids[self.plan.shards.positions(shard)]
            ids = ids[~np.isin(ids, rejected)]
            opened = ArrowShard(
                self.folder.shard(shard),
                size_bytes=part.facts.size_bytes,
                samples=part.facts.samples,
                sums=part.facts.sums,
                shown=printable(shard_name(shard)),
            )
            opened.rewrite_source(ids - np.searchsorted(rejected, ids))


def _check_share(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ConfigError(f"rank: got {rank} of size {size}, wanted 0 <= rank < size.")


def _destination(dst: Folder, origin: Origin) -> bytes:
    path = local_path(os.fspath(dst))
    if not path:
        raise ConfigError(
            f"dst: got {show(dst)}, wanted a local folder. Pack there, then copy the folder, "
            "`_penstock` included, with your store's own tool."
        )
    root = os.path.abspath(path)
    # Tar files that were picked may have the pack beside them; a folder is the dataset as a whole.
    lies_in = origin.root if isinstance(origin, LocalFolder) else getattr(origin, "mount", None)
    if lies_in is not None and origin.selection is None:
        source, target = os.path.realpath(lies_in), os.path.realpath(root)
        if os.path.commonpath((source, target)) in (source, target):
            raise ConfigError(
                f"dst: {printable(root)} and the source {printable(lies_in)} lie one inside "
                "the other. Give a folder outside the source."
            )
    return root


def _source(origin: Origin, scratch: Scratch, *, format: Format, workers: int) -> PackSource:
    opener = Opener(origin=origin, scratch=scratch, index=None, verify=None, workers=1)
    index = opener.open_pack(format) if format in ("auto", "arrow") else None
    if index is not None:
        return PackedSource(index)
    if opener.is_tar(format):
        return TarSource(origin, workers=workers)
    return FolderSource(origin)


def _summary(manifest: Manifest, began: float) -> PackSummary:
    return PackSummary(
        samples=manifest.about.samples,
        shards=len(manifest.names),
        bytes=int(manifest.shard_bytes.sum()),
        quarantined=manifest.about.quarantined,
        seconds=time.monotonic() - began,
        complete=True,
        progressive=manifest.about.progressive,
    )


def _share(parts: list[Part], began: float) -> PackSummary:
    facts = [part.facts for part in parts if part.facts is not None]
    return PackSummary(
        samples=sum(f.samples for f in facts),
        shards=len(facts),
        bytes=sum(f.size_bytes for f in facts),
        quarantined=sum(len(part.rejected) for part in parts),
        seconds=time.monotonic() - began,
        complete=False,
        progressive=sum(f.progressive or 0 for f in facts),
    )
