"""Write the shards of a pack into its folder, with a record of each finished shard.

Samples are read, checked, transcoded and written, shard by shard. Each shard is written, renamed
into place and then recorded; the folder also holds the settings, which a run that resumes must
match.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import DatasetError, DestinationError, OtherVersionError, WriteError, ordered
from penstock.readers.files import (
    OWN_FOLDER,
    ProgressReporter,
    make_folder,
    printable,
    temp_name,
    write_json,
)
from penstock.readers.formats import ShardSummary, Sums
from penstock.readers.formats.pack import write_shard
from penstock.readers.index import MANIFEST, check_summary, read_manifest
from penstock.readers.origin import QUARANTINE, QuarantineEntry, noted_left_out
from penstock.readers.packing.pack_sample import shard_content
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from penstock.readers.formats.pack import ShardContent
    from penstock.readers.index import Manifest
    from penstock.readers.origin import LeftOut
    from penstock.readers.packing.pack_plan import PackPlan
    from penstock.readers.packing.pack_sample import PackSample
    from penstock.readers.packing.pack_sources import SampleGroup, SampleSource
    from penstock.readers.packing.transcode import Transcode
    from penstock.readers.types import Progress, Verify

_SHARD = re.compile(rb"\.?shard-\d{6,}\.arrow(\.tmp)?")
_SETTINGS = b"pack.json"
_REMEDY = "Give an empty or new folder as the destination."


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """What is recorded of a finished shard.

    facts: None if none of its samples was good. rejected: ids in the source's index if no file
    were bad, with what the quarantine shall say.
    """

    facts: ShardSummary | None
    rejected: list[tuple[int, QuarantineEntry]]


def shard_name(shard: int) -> bytes:
    """Such as b"shard-000003.arrow"."""
    return b"shard-%06d.arrow" % shard


class PackFolder:
    """A pack's folder while it is written. settings: what the pack shall be; equal settings make
    equal packs."""

    def __init__(self, root: bytes, settings: Mapping[str, Any]) -> None:
        self.root = root
        self.own = os.path.join(root, OWN_FOLDER)
        self._records = os.path.join(self.own, b"parts")
        self.settings = dict(settings)

    def finished(self) -> Manifest | None:
        """The manifest, if this very pack is complete. Raises DestinationError if the folder holds
        anything else; touches nothing."""
        try:
            names = set(os.listdir(self.root))
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise self._foreign("it is a file") from None
        strange = sorted(n for n in names if n != OWN_FOLDER and not _SHARD.fullmatch(n))
        if strange:
            raise self._foreign(f"it holds other files ({printable(strange[0])}, …)")
        own = set(os.listdir(self.own)) if OWN_FOLDER in names else set()
        if MANIFEST in own:
            return self._matching(os.path.join(self.own, MANIFEST))
        if _SETTINGS in own:
            with open(os.path.join(self.own, _SETTINGS), "rb") as file:
                self._compare(json.load(file))
        elif names - {OWN_FOLDER} or own - {os.path.basename(temp_name(_SETTINGS))}:
            raise self._foreign("it holds shards or an index of something else")
        return None

    def left_out(self, manifest: Manifest) -> Mapping[str, LeftOut]:
        """The samples that the pack leaves out, by reason."""

        def read() -> bytes:
            with open(os.path.join(self.own, QUARANTINE), "rb") as file:
                return file.read()

        about = manifest.about
        return noted_left_out(
            about.samples_left_out, about.quarantined, read, place=printable(self.own)
        )

    def begin(self) -> None:
        """Make the folders and say what this will be. Raises WriteError, DestinationError."""
        # The settings first: with anything else beside it, a folder without them isn't ours.
        make_folder(self.own)
        settings = os.path.join(self.own, _SETTINGS)
        if not os.path.exists(settings):
            try:
                write_json(settings, self.settings)
            except WriteError:  # another rank put the same file there at the same moment
                if self.finished() is None and not os.path.exists(settings):
                    raise
        make_folder(self._records)

    def shard(self, shard: int) -> bytes:
        """Path of a shard's file."""
        return os.path.join(self.root, shard_name(shard))

    def record(self, shard: int) -> bytes:
        """Path of a shard's record."""
        return os.path.join(self._records, b"%06d.json" % shard)

    def write_record(self, shard: int, record: ShardRecord) -> None:
        """Record a shard whose file is in place. Raises WriteError."""
        rejected = [[i, os.fsdecode(q.name), q.reason] for i, q in record.rejected]
        facts = asdict(record.facts) if record.facts is not None else None
        write_json(self.record(shard), {"facts": facts, "rejected": rejected})

    def read_record(self, shard: int) -> ShardRecord | None:
        """A finished shard's record; None if it isn't finished or its file isn't as recorded."""
        try:
            with open(self.record(shard), "rb") as file:
                record = _parse_record(json.load(file))
            facts = record.facts
            if facts is None or os.stat(self.shard(shard)).st_size == facts.size_bytes:
                return record
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass
        return None

    def sweep(self, shards: range) -> None:
        """Remove what a killed run left half-written of these shards."""
        for shard in shards:
            for path in (self.shard(shard), self.record(shard)):
                with suppress(FileNotFoundError):
                    os.unlink(temp_name(path))

    def tidy(self) -> None:
        """After the manifest: what only an unfinished pack needs goes."""
        shutil.rmtree(self._records, ignore_errors=True)
        shutil.rmtree(os.path.join(self.own, b"ranks"), ignore_errors=True)
        for name in os.listdir(self.own):
            if name == _SETTINGS or name.endswith(b".tmp"):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.own, name))

    def _matching(self, path: bytes) -> Manifest:
        try:
            manifest = read_manifest(path, remedy=_REMEDY)
        except OtherVersionError:
            raise self._foreign("it holds a pack of another version of Penstock") from None
        except DatasetError as error:
            raise self._foreign(str(error).rstrip(".")) from error
        if manifest.format.indexing is not None:
            raise self._foreign("it is images or tar files with their index")
        self._compare(manifest.about.settings)
        sizes = zip(manifest.names, manifest.shard_bytes.tolist(), strict=True)
        for name, size_bytes in sizes:
            found = os.path.join(self.root, name)
            if not os.path.exists(found) or os.stat(found).st_size != size_bytes:
                raise self._foreign(
                    f"it is this pack, but {printable(name)} is missing or truncated"
                )
        return manifest

    def _compare(self, there: Mapping[str, Any]) -> None:
        differing = sorted(k for k, v in self.settings.items() if there.get(k) != v)
        if differing:
            key = differing[0]
            raise self._foreign(
                f"it holds a pack with another {key} ({there.get(key)!r}, this is "
                f"{self.settings[key]!r})"
            )

    def _foreign(self, why: str) -> DestinationError:
        return DestinationError(f"{printable(self.root)}: {why}. Nothing was touched. {_REMEDY}")


def _parse_record(value: Mapping[str, Any]) -> ShardRecord:
    facts = value["facts"]
    if facts is not None:
        labels = facts["labels"]
        facts = ShardSummary(
            samples=facts["samples"],
            size_bytes=facts["size_bytes"],
            sums=Sums(**facts["sums"]),
            labels=None if labels is None else {int(k): v for k, v in labels.items()},
            fields={name: check_summary(each) for name, each in facts["fields"].items()},
            files=facts["files"],
            overhead_bytes=facts.get("overhead_bytes"),
        )
    rejected = [
        (i, QuarantineEntry(name=os.fsencode(name), reason=reason))
        for i, name, reason in value["rejected"]
    ]
    return ShardRecord(facts=facts, rejected=rejected)


_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardDraft:
    """A shard's samples, good and bad, before it is written."""

    shard: int
    positions: NDArray[np.int64]
    samples: list[PackSample | Rejection]
    names: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWriter:
    """Writes shards of a plan into a pack's folder. verify: decodes images, None for the installed
    decoder; workers: threads."""

    source: SampleSource
    plan: PackPlan
    folder: PackFolder
    verify: Verify | None
    transcode: Transcode
    workers: int
    progress: Progress | None

    def write(self, mine: range) -> list[ShardRecord]:
        """Write the shards of one rank that aren't finished; returns the records of all of them.

        Raises IndexChangedError, DatasetError, FetchError, WriteError.
        """
        self.folder.sweep(mine)
        records = {shard: self.folder.read_record(shard) for shard in mine}
        positions = {shard: self.plan.grouping.positions(shard) for shard in mine}
        reporter = ProgressReporter(
            f"Packing {self.source.url}",
            total=sum(len(p) for p in positions.values()),
            progress=self.progress,
            remedy="`penstock pack` shows a progress bar.",
        )
        left = [shard for shard, record in records.items() if record is None]
        done = [positions[shard] for shard, record in records.items() if record is not None]
        if done:
            _log.info("Resuming: %d of %d shards are finished", len(done), len(mine))
            ready = np.concatenate(done)
            reporter.done(len(ready), int(self.source.sizes[ready].sum()))
        drafts = self._drafts(left, reporter)
        # One thread writes a shard while the next one is decoded.
        written = ordered(
            self._write_shard, drafts, workers=1, ahead=1, name="pack-write", leave_s=None
        )
        records |= zip(left, written, strict=True)
        return [record for record in records.values() if record is not None]

    def _drafts(self, shards: list[int], reporter: ProgressReporter) -> Iterator[_ShardDraft]:
        wanted = ((shard, self.plan.grouping.positions(shard)) for shard in shards)
        groups = self.source.groups(wanted, verify=self.verify, workers=self.workers)
        for shard in shards:
            positions = self.plan.grouping.positions(shard)
            samples: list[PackSample | Rejection] = []
            names: list[bytes] = []
            while len(samples) < len(positions):
                group = next(groups)
                names += group.names
                samples += self._transcoded(group)
                reporter.done(len(group.positions), int(self.source.sizes[group.positions].sum()))
            yield _ShardDraft(shard=shard, positions=positions, samples=samples, names=names)

    def _transcoded(self, group: SampleGroup) -> Iterable[PackSample | Rejection]:
        if not self.transcode.is_needed:
            return group.samples
        ahead = self.workers + 2
        return ordered(
            self._transcode, group.samples, workers=self.workers, ahead=ahead, name="transcode"
        )

    def _transcode(self, sample: PackSample | Rejection) -> PackSample | Rejection:
        if isinstance(sample, Rejection):
            return sample
        return self.transcode.apply(sample, self.source.schema)

    def _write_shard(self, draft: _ShardDraft) -> ShardRecord:
        content = self._content(draft)
        facts = None
        if content is not None:
            facts = write_shard(self.folder.shard(draft.shard), content)
        rejected = [
            (
                int(self.plan.source_ids[position]),
                QuarantineEntry(name=self.source.name(position), reason=sample.reason),
            )
            for position, sample in zip(draft.positions.tolist(), draft.samples, strict=True)
            if isinstance(sample, Rejection)
        ]
        record = ShardRecord(facts=facts, rejected=rejected)
        self.folder.write_record(draft.shard, record)
        return record

    def _content(self, draft: _ShardDraft) -> ShardContent | None:
        """What goes into a shard; None where no sample is good."""
        good = [sample for sample in draft.samples if not isinstance(sample, Rejection)]
        if not good:
            return None
        is_good = np.array([not isinstance(sample, Rejection) for sample in draft.samples], bool)
        names = zip(draft.names, is_good.tolist(), strict=True)
        return shard_content(
            good,
            self.source.schema,
            source=self.plan.source_ids[draft.positions[is_good]],
            names=[name for name, is_one in names if is_one],
        )
