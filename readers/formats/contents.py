"""Reading candidates before they are examined: what can't be a sample isn't read whole.

A span that is a whole file is read by itself, and of a remote file kept nowhere, as where it lies
in a shard isn't known yet. Spans of larger files are read file by file, in their order there, of
remote ones through the cache.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.readers.fields.heads import HEAD_BYTES, has_head, refusal_by_head
from penstock.readers.formats.candidates import MISSING
from penstock.readers.formats.data_file import LocalFile, open_data_file
from penstock.readers.origin.local import LocalFolder
from penstock.readers.origin.remote import RemoteFolder
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.origin.origin import Entry, Origin
    from penstock.readers.types import Encoded

    Contents = dict[str, list[Encoded | Rejection | None]]

# Of a remote file up to this size looking at its head first costs more than it saves.
_SMALL_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A span to be read, and its place in what is returned."""

    field: str
    place: int
    type: FieldType
    file: int
    start: int
    size: int


def read_candidates(
    origin: Origin, candidates: Candidates, positions: NDArray[np.int64]
) -> Contents:
    """Read candidates: of each span field the bytes of each, why one can't be a sample, or None
    where it lacks the field.

    Raises IndexChangedError (a file isn't as it was listed), DatasetError, FetchError.
    """
    contents: Contents = {name: [None] * len(positions) for name in candidates.spans}
    whole: list[_Wanted] = []
    parts: dict[int, list[_Wanted]] = defaultdict(list)
    for wanted in _wanted(candidates, positions):
        size_bytes = candidates.files[wanted.file].size_bytes
        is_whole = wanted.start == 0 and wanted.size == size_bytes
        (whole if is_whole else parts[wanted.file]).append(wanted)
    files = [candidates.files[each.file] for each in whole]
    for each, sample in zip(whole, _read_files(origin, files, whole), strict=True):
        contents[each.field][each.place] = sample
    for number in sorted(parts):
        some = sorted(parts[number], key=lambda each: each.start)
        starts, sizes = [each.start for each in some], [each.size for each in some]
        with open_data_file(origin, candidates.files[number]) as opened:
            found = opened.read(starts, sizes, [each.type for each in some])
        for each, sample in zip(some, found, strict=True):
            contents[each.field][each.place] = sample
    return contents


def _wanted(candidates: Candidates, positions: NDArray[np.int64]) -> Iterator[_Wanted]:
    for name, spans in candidates.spans.items():
        columns = (spans.files, spans.starts, spans.sizes)
        rows = zip(*(column[positions].tolist() for column in columns), strict=True)
        for place, (file, start, size) in enumerate(rows):
            if file != MISSING:
                yield _Wanted(name, place, candidates.schema[name], file, start, size)


def _read_files(
    origin: Origin, files: Sequence[Entry], wanted: Sequence[_Wanted]
) -> list[Encoded | Rejection]:
    """Whole files."""
    types = [each.type for each in wanted]
    if isinstance(origin, RemoteFolder):
        return _read_remote(origin, files, types)
    if isinstance(origin, LocalFolder):
        return [_read_local(origin, file, type) for file, type in zip(files, types, strict=True)]
    raise TypeError(f"unknown origin {origin!r}")


def _read_remote(
    origin: RemoteFolder, files: Sequence[Entry], types: Sequence[FieldType]
) -> list[Encoded | Rejection]:
    """Over many files at once: of large ones the head is looked at first."""
    first = [
        HEAD_BYTES if has_head(type) and file.size_bytes > _SMALL_BYTES else file.size_bytes
        for file, type in zip(files, types, strict=True)
    ]
    samples: list[Encoded | Rejection] = []
    heads = origin.read(list(zip(files, first, strict=True))) if files else []
    for data, type in zip(heads, types, strict=True):
        refusal = refusal_by_head(type, data[:HEAD_BYTES].tobytes()) if has_head(type) else None
        samples.append(data if refusal is None else refusal)
    large = [
        i
        for i, sample in enumerate(samples)
        if not isinstance(sample, Rejection) and first[i] < files[i].size_bytes
    ]
    rest = origin.read([(files[i], files[i].size_bytes) for i in large]) if large else []
    for i, data in zip(large, rest, strict=True):
        samples[i] = data
    return samples


def _read_local(origin: LocalFolder, file: Entry, type: FieldType) -> Encoded | Rejection:
    with LocalFile(origin, file) as opened:
        (sample,) = opened.read([0], [file.size_bytes], [type])
        return sample
