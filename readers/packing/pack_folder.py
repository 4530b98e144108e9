"""Keep the folder of a pack that is being written, with a record of each finished shard.

Each shard is written, renamed to its final name, and then recorded. The folder also contains the
settings, which a run that resumes must match.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache import DatasetError, DestinationError, OtherVersionError, WriteError
from penstock.readers.files import OWN_FOLDER, make_folder, printable, temp_name, write_json
from penstock.readers.formats import ShardSummary, Sums
from penstock.readers.index import MANIFEST, check_summary, read_manifest
from penstock.readers.origin import QuarantineEntry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.index import Manifest

_SHARD = re.compile(rb"\.?shard-\d{6,}\.arrow(\.tmp)?")
_SETTINGS = b"pack.json"
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
    """The folder of a pack that is being written.

    settings: identify the pack; equal settings make equal packs. inside: a folder into which its
    shards and records are written first, by a task that may be lost.
    """

    def __init__(
        self, root: bytes, settings: Mapping[str, Any], *, inside: bytes | None = None
    ) -> None:
        self.root, self.settings = root, dict(settings)
        self.own = os.path.join(root, OWN_FOLDER)
        self._shards = inside or root
        self._records = inside or os.path.join(self.own, b"parts")

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
        return os.path.join(self._shards, shard_name(shard))

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

    def tidy(self) -> None:
        """Remove the files that only an unfinished pack needs. Call this after the manifest is
        written."""
        shutil.rmtree(self._records, ignore_errors=True)
        shutil.rmtree(os.path.join(self.own, b"ranks"), ignore_errors=True)
        for folder in (self.root, self.own):
            for name in os.listdir(folder):
                if name == _SETTINGS or name.endswith(b".tmp"):
                    with suppress(FileNotFoundError):
                        os.unlink(os.path.join(folder, name))

    def _matching(self, path: bytes) -> Manifest:
        try:
            manifest = read_manifest(path, remedy=_REMEDY)
        except OtherVersionError:
            raise self._foreign("the folder holds a pack of another version of Penstock") from None
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
    rejected = [
        (i, QuarantineEntry(name=os.fsencode(name), reason=reason))
        for i, name, reason in value["rejected"]
    ]
    return ShardRecord(facts=facts, rejected=rejected)
