"""Write the shards of a pack into its folder: read, check and transcode their samples, and record
each finished shard.

A shard is one task, which may run twice and always writes the same bytes. This process runs the
tasks of its rank, or the workers of an executor run all: the driver lists, plans and completes. A
shard is written, renamed to its final name, and then recorded. If the driver is killed, the records
in the folder stay, and the same call resumes from them. A worker's task writes into a folder of its
own below the driver's, which renames and records the finished file. The driver removes its folder
before it completes the pack, so that a lost worker can't add anything afterwards.

The folder also contains the settings of the pack, which a run that resumes must match.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from penstock.cache import DatasetError, DestinationError, WriteError, ordered, run_tasks
from penstock.readers.files import (
    OWN_FOLDER,
    make_folder,
    printable,
    temp_name,
    write_error,
    write_json,
)
from penstock.readers.formats import ShardSummary, Sums
from penstock.readers.formats.pack import PackSample, ShardContent, write_shard
from penstock.readers.index import MANIFEST, Manifest, check_summary, read_manifest
from penstock.readers.origin import QuarantineEntry
from penstock.readers.types import Rejection, Verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from penstock.readers.fieldtypes import Schema
    from penstock.readers.packing.pack_sources import PackSource, PlannedShard
    from penstock.readers.packing.transcode import Transcode

    Found = tuple[bytes, PackSample | Rejection]

_SHARD = re.compile(rb"\.?shard-\d{6,}\.arrow(\.tmp)?")
_SETTINGS, _RANKS = b"pack.json", b"ranks"
_REMEDY = "Give an empty or new folder as the destination."


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
        self.root, self.settings = root, dict(settings)
        self.own = os.path.join(root, OWN_FOLDER)
        self.ranks = os.path.join(self.own, _RANKS)
        self._records = os.path.join(self.own, b"parts")

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

    def _record(self, shard: int) -> bytes:
        return os.path.join(self._records, b"%06d.json" % shard)

    def write_record(self, shard: int, record: ShardRecord) -> None:
        """Record a shard whose file has its final name. Raises WriteError."""
        rejected = [[i, os.fsdecode(q.name), q.reason] for i, q in record.rejected]
        facts = asdict(record.facts) if record.facts is not None else None
        write_json(self._record(shard), {"facts": facts, "rejected": rejected})

    def read_record(self, shard: int) -> ShardRecord | None:
        """Return the record of a finished shard. Return None if the shard isn't finished or its
        file doesn't match the record."""
        try:
            with open(self._record(shard), "rb") as file:
                record = _parse_record(json.load(file))
            facts = record.facts
            if facts is None or os.stat(self.shard(shard)).st_size == facts.size_bytes:
                return record
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass
        return None

    def tidy(self) -> None:
        """Remove the files that only an unfinished pack needs. Call this after the manifest is
        written."""
        shutil.rmtree(self._records, ignore_errors=True)
        shutil.rmtree(self.ranks, ignore_errors=True)
        for folder in (self.root, self.own):
            for name in os.listdir(folder):
                if name == _SETTINGS or name.endswith(b".tmp"):
                    with suppress(FileNotFoundError):
                        os.unlink(os.path.join(folder, name))

    def _matching(self, path: bytes) -> Manifest:
        try:
            manifest = read_manifest(path, remedy=_REMEDY)
        except DatasetError as error:
            raise self._foreign(str(error).rstrip(".")) from error
        if not manifest.format.has_own_index:
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
        facts |= {
            "sums": Sums(**facts["sums"]),
            "labels": None if labels is None else {int(k): v for k, v in labels.items()},
            "fields": {name: check_summary(each) for name, each in facts["fields"].items()},
            "units": (),
            "field_bytes": (),
        }
        facts = ShardSummary(**facts)
    listed = ((i, os.fsencode(name), reason) for i, name, reason in value["rejected"])
    rejected = [(i, QuarantineEntry(name=name, reason=reason)) for i, name, reason in listed]
    return ShardRecord(facts=facts, rejected=rejected)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRules:
    """How the samples of a pack are checked and rewritten. verify: decodes images, or its name;
    None means the installed decoder. workers: threads."""

    transcode: Transcode
    verify: Verify | str | None
    workers: int


def write_shards(
    source: PackSource, shards: Sequence[PlannedShard], to: Callable[[int], bytes], rules: PackRules
) -> Iterator[ShardRecord]:
    """Write shards, and yield their records in order. to: paths of shards' files by their numbers.

    Raises IndexChangedError, DatasetError, FetchError, WriteError.
    """

    def transcoded(found: Found) -> Found:
        name, sample = found
        if isinstance(sample, Rejection):
            return found
        return name, rules.transcode.apply(sample, source.schema)

    def drafts() -> Iterator[tuple[PlannedShard, list[Found]]]:
        """Yield each shard with the names of its samples, and the samples, good and bad."""
        n = rules.workers
        samples = source.samples(shards, verify=rules.verify, workers=n)
        if rules.transcode.is_needed:
            samples = ordered(transcoded, samples, workers=n, ahead=n + 2, name="transcode")
        for shard in shards:
            yield shard, list(islice(samples, len(shard.positions)))

    # One thread writes a shard while the next one is decoded.
    return ordered(
        lambda draft: _write_shard(source.schema, to(draft[0].number), *draft),
        drafts(),
        workers=1,
        ahead=1,
        name="pack-write",
        leave_s=None,
    )


def _write_shard(
    schema: Schema, path: bytes, shard: PlannedShard, found: Sequence[Found]
) -> ShardRecord:
    """Write the good samples of a shard."""
    good = [(name, sample) for name, sample in found if isinstance(sample, PackSample)]
    facts = None
    if good:
        names, samples = zip(*good, strict=True)
        source = shard.source_ids[[isinstance(sample, PackSample) for _, sample in found]]
        content = ShardContent(schema=schema, samples=samples, source=source, names=names)
        facts = write_shard(path, content)
    rejected = [
        (source_id, QuarantineEntry(name=name, reason=sample.reason))
        for source_id, (name, sample) in zip(shard.source_ids.tolist(), found, strict=True)
        if isinstance(sample, Rejection)
    ]
    return ShardRecord(facts=facts, rejected=rejected)


def write_task(
    open: Callable[[], PackSource], shard: PlannedShard, root: bytes, run: bytes, rules: PackRules
) -> tuple[bytes, ShardRecord]:
    """Write one shard of a pack into a new folder, in a worker of an executor. Return the path of
    its file, and its record.

    open: opens its source. root: the pack's folder. run: the driver's folder in it. Raises
    DestinationError if this machine doesn't see the destination or the run is over, errors of
    reading, and WriteError.
    """
    name = shard_name(shard.number)
    folder = os.path.join(run, b"%s-%s" % (name, secrets.token_hex(8).encode()))
    source = open()
    try:
        os.mkdir(folder)
    except FileNotFoundError:
        raise DestinationError(
            f"{printable(root)}: the folder of this run doesn't exist on this machine. Give a "
            "destination that is mounted under the same path on every machine. If it is, the "
            "driver of this run has ended, and another one continues."
        ) from None
    except OSError as error:
        raise write_error(root, error) from error
    path = os.path.join(folder, name)
    (record,) = write_shards(source, [shard], lambda _: path, rules)
    return path, record


def write_by_executor(
    executor: Executor,
    shards: Sequence[PlannedShard],
    *,
    source: PackSource,
    folder: PackFolder,
    rules: PackRules,
) -> Iterator[tuple[PlannedShard, ShardRecord]]:
    """Write shards by the workers of an executor, and yield each with its record when it is done.
    Raises the errors of tasks, with the worker's name, and WorkerError."""
    for name in os.listdir(folder.ranks):  # the workers of earlier runs can't finish
        if name.startswith(b"run-"):
            shutil.rmtree(os.path.join(folder.ranks, name), ignore_errors=True)
    run = os.path.join(folder.ranks, b"run-" + secrets.token_hex(8).encode())
    make_folder(run)

    tasks = (
        (shard, partial(write_task, *source.for_worker(shard), folder.root, run, rules))
        for shard in shards
    )
    try:
        for shard, (path, record) in run_tasks(executor, tasks, what="shards", total=len(shards)):
            try:
                if record.facts is not None:
                    os.replace(path, folder.shard(shard.number))
            except OSError as error:
                raise write_error(folder.root, error) from error
            shutil.rmtree(os.path.dirname(path), ignore_errors=True)
            yield shard, record
    finally:
        # Tasks that still run can't write any more.
        shutil.rmtree(run, ignore_errors=True)
