"""A pack's folder while it is written: its settings, and a record of each finished shard."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import (
    DatasetError,
    DestinationError,
    OtherVersionError,
    WriteError,
)
from penstock.readers.files.atomic import make_folder, temp_name, write_json
from penstock.readers.files.names import OWN_FOLDER, printable
from penstock.readers.formats.summary import ShardSummary, Sums
from penstock.readers.index.field_summaries import check_summary
from penstock.readers.index.manifest_file import MANIFEST, read_manifest
from penstock.readers.origin.quarantine import QUARANTINE, QuarantineEntry, noted_left_out

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.index.manifest import Manifest
    from penstock.readers.origin.quarantine import LeftOut

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
