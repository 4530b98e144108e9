"""What a set of tar files holds: by headers, labels and json; nothing is decoded."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

from penstock.cache.errors import DatasetError, PenstockWarning
from penstock.cache.threads import ordered
from penstock.readers.files.names import printable
from penstock.readers.formats.arranging import given_types
from penstock.readers.formats.data_file import drop_copy, is_here, open_data_file
from penstock.readers.formats.tar.archive_samples import NO_KEY, archive_samples
from penstock.readers.formats.tar.joining import join
from penstock.readers.formats.tar.member_fields import Asked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.tar.archive_samples import ArchiveSamples
    from penstock.readers.origin.origin import Entry, Origin

_NAMED = 5

_log = logging.getLogger("penstock")


def list_samples(
    origin: Origin, archives: Sequence[Entry], *, workers: int, warns: bool = True
) -> Candidates:
    """Read all headers, labels and json; remote archives are fetched whole for that. warns: of what
    is left out.

    Raises DatasetError (an archive is torn, damaged or compressed; fields that can't be),
    ConfigError (the user names fields that aren't there), IndexChangedError (an archive changed
    meanwhile), FetchError.
    """
    arrangement = origin.arrangement
    names = {where.lower(): name for name, where in arrangement.places}
    names |= {where: name for name, where in arrangement.places}  # keys of json as they stand
    asked = Asked(given_types(arrangement), names)

    def read_once(entry: Entry) -> ArchiveSamples:
        with open_data_file(origin, entry, whole=True) as opened:
            return archive_samples(entry, opened, asked)

    def read(entry: Entry) -> ArchiveSamples:
        was_here = is_here(origin, entry)
        try:
            return read_once(entry)
        except DatasetError:
            if not was_here:
                raise
        drop_copy(origin, entry)
        return read_once(entry)

    found = list(ordered(read, archives, workers=workers, ahead=workers + 2, name="tar-list"))
    joined = join(found, asked, url=origin.url)
    if warns:
        for note in joined.notes:
            _log.info("%s: %s.", origin.url, note)
        _warn_of_members(origin.url, joined.candidates.passed_over)
        _warn_of_keys(origin.url, joined.left_out)
        _tell_of_refused(origin.url, joined.candidates)
    return joined.candidates


def _warn_of_members(url: str, passed_over: Mapping[str, int]) -> None:
    kinds = {extension: count for extension, count in passed_over.items() if extension != NO_KEY}
    if not kinds:
        return
    some = list(kinds.items())[:_NAMED]
    listed = ", ".join(f"{count:,} .{extension}" for extension, count in some)
    more = " and others" if len(kinds) > _NAMED else ""
    warnings.warn(
        f"{url}: {listed}{more} members are left out, and were never opened: nothing is known of "
        f'their kind. schema={{"{next(iter(kinds))}": Bytes()}} hands out their bytes '
        "(docs/fields.md).",
        PenstockWarning,
        stacklevel=8,
    )


def _warn_of_keys(url: str, left_out: Mapping[str, str]) -> None:
    if not left_out:
        return
    listed = "; ".join(
        f'"{name}": {why.removeprefix(f"{url}: ").rstrip(".")}'
        for name, why in list(left_out.items())[:_NAMED]
    )
    more = f"; and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
    warnings.warn(
        f"{url}: keys of json are left out: {listed}{more}. A type in schema= says what is meant.",
        PenstockWarning,
        stacklevel=8,
    )


def _tell_of_refused(url: str, candidates: Candidates) -> None:
    if candidates.quarantined:
        first = candidates.quarantined[0]
        _log.warning(
            "%s: %d keys or members are left out, such as %s: %s. All are in the index's "
            "quarantine.jsonl.",
            url,
            len(candidates.quarantined),
            printable(first.name),
            first.reason,
        )
    numbered = [name for name in candidates.spans if name.isdigit()]
    if len(numbered) > 1:
        _log.warning(
            "%s: the fields %s are numbers: a key ends at the first dot of a name, so that %s is "
            "of one sample with the others. If each is a sample, rename the members: no dot but "
            "the last.",
            url,
            ", ".join(map(repr, numbered[:_NAMED])),
            f"NAME.{numbered[0]}.jpg",
        )
