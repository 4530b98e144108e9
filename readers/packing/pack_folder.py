"""Write the shards of a pack into its folder, with a record of each finished shard.

Samples are read, checked, transcoded and written shard by shard. Each shard is written, renamed to
its final name, and then recorded. The folder also contains the settings, which a run that resumes
must match.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import DatasetError, DestinationError, OtherVersionError, WriteError, ordered
from penstock.readers.fieldtypes import (
    DenseColumn,
    EncodedColumn,
    RaggedColumn,
    image_fields,
    is_progressive,
)
from penstock.readers.files import (
    OWN_FOLDER,
    ProgressReporter,
    make_folder,
    printable,
    temp_name,
    write_json,
)
from penstock.readers.formats import ShardSummary, Sums
from penstock.readers.formats.pack import PictureFacts, ShardContent, pack_forms, write_shard
from penstock.readers.index import MANIFEST, check_summary, read_manifest
from penstock.readers.origin import QUARANTINE, QuarantineEntry, noted_left_out
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, Schema
    from penstock.readers.formats.pack import PackForm
    from penstock.readers.index import Manifest
    from penstock.readers.origin import LeftOut
    from penstock.readers.packing.pack_plan import PackPlan
    from penstock.readers.packing.pack_sources import PackSample, SampleGroup, SampleSource
    from penstock.readers.packing.transcode import Transcode
    from penstock.readers.types import Encoded, Facts, Progress, Verify

_SHARD = re.compile(rb"\.?shard-\d{6,}\.arrow(\.tmp)?")
_SETTINGS = b"pack.json"
_REMEDY = "Give an empty or new folder as the destination."
_EMPTY = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """The record of a finished shard.

    facts: None if none of its samples was good. rejected: the id of each bad sample in the source's
    index if no file were bad, with its entry in the quarantine.
    """

    facts: ShardSummary | None
    rejected: list[tuple[int, QuarantineEntry]]


def shard_name(shard: int) -> bytes:
    """Return the name of a shard's file, such as b"shard-000003.arrow"."""
    return b"shard-%06d.arrow" % shard


class PackFolder:
    """The folder of a pack that is being written. settings: identify the pack; equal settings make
    equal packs."""

    def __init__(self, root: bytes, settings: Mapping[str, Any]) -> None:
        self.root = root
        self.own = os.path.join(root, OWN_FOLDER)
        self._records = os.path.join(self.own, b"parts")
        self.settings = dict(settings)

    def finished(self) -> Manifest | None:
        """Return the manifest if this very pack is complete, else None. Raises DestinationError if
        the folder contains other data. Changes nothing."""
        try:
            names = set(os.listdir(self.root))
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise self._foreign("the destination is a file") from None
        strange = sorted(n for n in names if n != OWN_FOLDER and not _SHARD.fullmatch(n))
        if strange:
            raise self._foreign(f"the folder holds other files ({printable(strange[0])}, …)")
        own = set(os.listdir(self.own)) if OWN_FOLDER in names else set()
        if MANIFEST in own:
            return self._matching(os.path.join(self.own, MANIFEST))
        if _SETTINGS in own:
            with open(os.path.join(self.own, _SETTINGS), "rb") as file:
                self._compare(json.load(file))
        elif names - {OWN_FOLDER} or own - {os.path.basename(temp_name(_SETTINGS))}:
            raise self._foreign("the folder holds shards or an index of other data")
        return None

    def left_out(self, manifest: Manifest) -> Mapping[str, LeftOut]:
        """Return the samples that the pack leaves out, by reason."""

        def read() -> bytes:
            with open(os.path.join(self.own, QUARANTINE), "rb") as file:
                return file.read()

        about = manifest.about
        return noted_left_out(
            about.samples_left_out, about.quarantined, read, place=printable(self.own)
        )

    def begin(self) -> None:
        """Create the folders and write the settings. Raises WriteError, DestinationError."""
        # The settings come first: a folder with other files but without settings isn't a pack.
        make_folder(self.own)
        settings = os.path.join(self.own, _SETTINGS)
        if not os.path.exists(settings):
            try:
                write_json(settings, self.settings)
            except WriteError:  # another rank may have written the same file at the same time
                if self.finished() is None and not os.path.exists(settings):
                    raise
        make_folder(self._records)

    def shard(self, shard: int) -> bytes:
        """Return the path of a shard's file."""
        return os.path.join(self.root, shard_name(shard))

    def record(self, shard: int) -> bytes:
        """Return the path of a shard's record."""
        return os.path.join(self._records, b"%06d.json" % shard)

    def write_record(self, shard: int, record: ShardRecord) -> None:
        """Record a shard whose file has its final name. Raises WriteError."""
        rejected = [[i, os.fsdecode(q.name), q.reason] for i, q in record.rejected]
        facts = asdict(record.facts) if record.facts is not None else None
        write_json(self.record(shard), {"facts": facts, "rejected": rejected})

    def read_record(self, shard: int) -> ShardRecord | None:
        """Return the record of a finished shard. Return None if the shard isn't finished or its
        file doesn't match the record."""
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
        """Remove the temporary files that a killed run left of these shards."""
        for shard in shards:
            for path in (self.shard(shard), self.record(shard)):
                with suppress(FileNotFoundError):
                    os.unlink(temp_name(path))

    def tidy(self) -> None:
        """Remove the files that only an unfinished pack needs. Call this after the manifest is
        written."""
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
            raise self._foreign("the folder holds a pack of another version of Penstock") from None
        except DatasetError as error:
            raise self._foreign(str(error).rstrip(".")) from error
        if manifest.format.indexing is not None:
            raise self._foreign("the folder holds images or tar files with their index")
        self._compare(manifest.about.settings)
        for name, size_bytes in zip(manifest.names, manifest.shard_bytes.tolist(), strict=True):
            shard = os.path.join(self.root, name)
            if not os.path.exists(shard) or os.stat(shard).st_size != size_bytes:
                raise self._foreign(
                    f"the folder holds this pack, but {printable(name)} is missing or truncated"
                )
        return manifest

    def _compare(self, found: Mapping[str, Any]) -> None:
        differing = sorted(k for k, v in self.settings.items() if found.get(k) != v)
        if differing:
            key = differing[0]
            raise self._foreign(
                f"the folder holds a pack with another {key} ({found.get(key)!r}; this pack has "
                f"{self.settings[key]!r})"
            )

    def _foreign(self, reason: str) -> DestinationError:
        return DestinationError(f"{printable(self.root)}: {reason}. Nothing was changed. {_REMEDY}")


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
    """Write shards of a plan into a pack's folder. verify: decodes images; None means the installed
    decoder. workers: threads."""

    source: SampleSource
    plan: PackPlan
    folder: PackFolder
    verify: Verify | None
    transcode: Transcode
    workers: int
    progress: Progress | None

    def write(self, mine: range) -> list[ShardRecord]:
        """Write the shards of one rank that aren't finished, and return the records of all its
        shards.

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

        def transcode(sample: PackSample | Rejection) -> PackSample | Rejection:
            if isinstance(sample, Rejection):
                return sample
            return self.transcode.apply(sample, self.source.schema)

        ahead = self.workers + 2
        return ordered(
            transcode, group.samples, workers=self.workers, ahead=ahead, name="transcode"
        )

    def _write_shard(self, draft: _ShardDraft) -> ShardRecord:
        """Write the good samples of a shard, and record it."""
        good = [sample for sample in draft.samples if not isinstance(sample, Rejection)]
        facts = None
        if good:
            is_good = [not isinstance(sample, Rejection) for sample in draft.samples]
            content = _shard_content(
                good,
                self.source.schema,
                source=self.plan.source_ids[draft.positions[is_good]],
                names=list(compress(draft.names, is_good)),
            )
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


def _shard_content(
    samples: Sequence[PackSample],
    schema: Schema,
    *,
    source: NDArray[np.int64],
    names: Sequence[bytes],
) -> ShardContent:
    """Build the columns of a shard from at least one sample. source, names: see `ShardContent`."""
    columns: dict[str, Column] = {}
    crcs: dict[str, NDArray[np.uint32]] = {}
    pictures: dict[str, PictureFacts] = {}
    present: dict[str, NDArray[np.bool_]] = {}
    images = image_fields(schema, schema)
    for name, form in pack_forms(schema).items():
        if form.kind == "bytes":
            payloads = [sample.payloads.get(name) for sample in samples]
            facts = [sample.facts.get(name) for sample in samples]
            is_present = np.array([each is not None for each in payloads], bool)
            columns[name] = EncodedColumn([_EMPTY if p is None else p for p in payloads])
            crcs[name] = np.array([0 if f is None else f.crc32c for f in facts], np.uint32)
            if form.is_picture:
                pictures[name] = _picture(facts, payloads if name in images else None)
        else:
            arrays = [sample.arrays.get(name) for sample in samples]
            is_present = np.array([each is not None for each in arrays], bool)
            columns[name] = _numbers(arrays, form)
        if not is_present.all():
            present[name] = is_present
    return ShardContent(
        schema=schema,
        columns=columns,
        crcs=crcs,
        pictures=pictures,
        present=present,
        source=source,
        names=names,
    )


def _picture(
    facts: Sequence[Facts | None], images: Sequence[Encoded | None] | None
) -> PictureFacts:
    shapes = [(0, 0, 0) if each is None else each.shape for each in facts]
    return PictureFacts(
        shapes=np.array(shapes, np.int64).reshape(len(facts), 3),
        codecs=["" if each is None else each.codec for each in facts],
        progressive=(
            None
            if images is None
            else sum(is_progressive(image) for image in images if image is not None)
        ),
    )


def _numbers(arrays: Sequence[NDArray[Any] | None], form: PackForm) -> Column:
    """Build a column of arrays; a missing sample becomes zeros, or an empty array."""
    if not form.is_span:
        dense = np.zeros((len(arrays), *(length or 0 for length in form.row)), form.dtype)
        for row, each in enumerate(arrays):
            if each is not None:
                dense[row] = each
        return DenseColumn(dense)
    lengths = form.row if form.kind == "shaped" else (0, *form.row)
    empty = np.empty(tuple(length or 0 for length in lengths), form.dtype)
    values = [empty if each is None else each.astype(form.dtype, copy=False) for each in arrays]
    like = RaggedColumn(empty, np.zeros(1, np.int64))
    if form.kind == "shaped":
        like = RaggedColumn(
            empty.reshape(-1), np.zeros(1, np.int64), np.zeros((0, empty.ndim), np.int64)
        )
    return RaggedColumn.of(values, like=like)
