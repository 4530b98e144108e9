"""Locate the arrays of .npy and .npz files by their headers, and choose the fields and samples.

No array's numbers are read, and nothing is ever unpickled. Python's zipfile reads an archive's
directory from the end of the file, and every claim of the directory is checked against the file
before it is used. The headers of members are read here, all at once: zipfile would need a request
for each, and doesn't state where a member's contents begin.

The arrays of one archive belong together, and so do the files of several fields that are matched by
name. A sample is a row, a window of rows, or a whole file.

Source: APPNOTE.TXT, the description of .ZIP files; numpy.savez.
"""

from __future__ import annotations

import fnmatch
import io
import math
import os
import struct
import zlib
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np

from penstock.cache import ConfigError, DatasetError, log, ordered
from penstock.readers.fieldtypes import MAX_HEAD_BYTES, UNSUPPORTED_NPY, NpyHeader, read_npy_header
from penstock.readers.files import extension, printable
from penstock.readers.formats.array_fields import array_schema, chosen_arrays, matched_windows
from penstock.readers.formats.array_windows import MAX_AXES, ArrayWindows
from penstock.readers.formats.dataset_arguments import Sampling
from penstock.readers.formats.unindexed_files import read_file_parts, refusing
from penstock.readers.origin import Entry, LeftOut, Origin, left_out_for
from penstock.readers.types import ArrayCodec, Rejection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.readers.fieldtypes import Schema

    Read = Callable[[Iterable[tuple[int, int]]], list[bytes]]


FIELD = "array"
"""The field's name of arrays in .npy files."""

_FILE_HINT = 'sample="file" makes each file one sample'


@dataclass(frozen=True, slots=True)
class StoredArray:
    """The location of an array in a file.

    start, size_bytes: its bytes in the file. packed: None if these bytes are the array's numbers
    themselves; if they are compressed, the bytes of the decompressed .npy file, those of its
    header, and its CRC-32.
    """

    entry: Entry
    start: int
    size_bytes: int
    codec: ArrayCodec
    shape: tuple[int, ...]
    packed: tuple[int, int, int] | None = None

    @property
    def is_fortran(self) -> bool:
        """True if its numbers are stored column by column and that makes a difference."""
        return self.codec.is_fortran and sum(length > 1 for length in self.shape) > 1

    @property
    def numbers_bytes(self) -> int:
        """The bytes of its numbers, decompressed."""
        return math.prod(self.shape) * self.codec.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayGroup:
    """Arrays whose samples belong together, by field.

    name: of their file, or of the first file. left_out: other arrays of the file, and why they
    aren't fields. windows: the samples of each field, the same number for all; empty until they are
    chosen.
    """

    name: bytes
    arrays: Mapping[str, StoredArray]
    left_out: Mapping[str, str] = field(default_factory=dict)
    windows: Mapping[str, ArrayWindows] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """The number of samples."""
        return next(iter(self.windows.values())).samples


def read_arrays(origin: Origin, entries: Sequence[Entry], *, workers: int) -> list[StoredArray]:
    """Read the headers of .npy files, all at once.

    Raises DatasetError (a file is damaged, or can't be a tensor), IndexChangedError or FetchError.
    """
    parts = [(entry, 0, min(entry.size_bytes, MAX_HEAD_BYTES)) for entry in entries]
    arrays = []
    for entry, head in zip(entries, read_file_parts(origin, parts, workers=workers), strict=True):
        header = _parse_header(head, entry.size_bytes)
        if isinstance(header, Rejection):
            raise DatasetError(
                f"{printable(entry.name)}: {header.reason}. Write or fetch it again, or remove it "
                "from the dataset."
            )
        start, size_bytes = header.start, entry.size_bytes - header.start
        arrays.append(StoredArray(entry, start, size_bytes, header.codec, header.shape))
    return arrays


def _parse_header(head: bytes, size_bytes: int) -> NpyHeader | Rejection:
    """Parse the header of a .npy file of this size."""
    header = read_npy_header(np.frombuffer(head, np.uint8), size_bytes=size_bytes)
    if isinstance(header, NpyHeader) and len(header.shape) > MAX_AXES:
        return Rejection(f"{UNSUPPORTED_NPY} {len(header.shape)} axes: at most {MAX_AXES} are read")
    return header


MAX_CHUNK_BYTES = 2**32
"""The largest compressed member that is read, because a member is decompressed as a whole."""

_TAIL_BYTES = (2**16 + 22, 2**22)
"""Bytes at the end of an archive that are read for its directory, at first and if it is long."""

_LOCAL = struct.Struct("<4s5H3L2H")
_HEAD_BYTES = _LOCAL.size + 2**8 + MAX_HEAD_BYTES
"""The first bytes of a member that are read, besides its name: writers add few extra fields."""

_MAX_RATIO = 1032
"""Deflate decompresses one byte to at most this many."""

_ENCRYPTED = 0x1
_UTF_8 = 0x800


def _read_archive(origin: Origin, entry: Entry) -> dict[str, StoredArray | Rejection]:
    """Read the directory and the headers of an .npz file, and return its arrays by the names of
    their members, or the reasons against these.

    Raises DatasetError, IndexChangedError or FetchError.
    """

    def read(spans: Iterable[tuple[int, int]]) -> list[bytes]:
        return read_file_parts(origin, [(entry, *span) for span in spans], workers=1)

    found, spans = dict[str, StoredArray | Rejection](), dict[ZipInfo, tuple[int, int]]()
    with refusing(entry, "this isn't an .npz file, or it is damaged: "):
        ends = _directory(entry.size_bytes, read)
        for member in ends:
            if (reason := _refusal(member)) is None:
                at, head_bytes = member.header_offset, len(_name(member)) + _HEAD_BYTES
                spans[member] = (at, min(at + head_bytes, entry.size_bytes))
            elif not member.is_dir():
                found[member.filename.removesuffix(".npy")] = Rejection(reason)
        for member, data in zip(spans, read(spans.values()), strict=True):
            start, head = _contents(member, ends[member], data)
            header = _parse_header(head, member.file_size)
            name = member.filename.removesuffix(".npy")
            if name in found:
                raise ValueError(f"two members have the name {member.filename!r}")
            if isinstance(header, Rejection):
                if not header.reason.startswith(UNSUPPORTED_NPY):
                    raise ValueError(f"{member.filename!r}: {header.reason}")
                found[name] = header
                continue
            is_packed, at = member.compress_type == ZIP_DEFLATED, header.start
            packed = (member.file_size, at, member.CRC) if is_packed else None
            at = 0 if is_packed else at
            size_bytes = member.compress_size - at
            about = header.codec, header.shape, packed
            found[name] = StoredArray(entry, start + at, size_bytes, *about)
    return found


def _directory(file_bytes: int, read: Read) -> dict[ZipInfo, int]:
    """Return the members, in the order of the directory, and where each ends at the latest: at the
    next one, or at the directory. Raises ValueError if members overlap."""
    for size_bytes in _TAIL_BYTES:
        first = max(0, file_bytes - size_bytes)
        (tail,) = read([(first, file_bytes)])
        try:
            # zipfile takes the end for a whole archive, whose members begin before it.
            with ZipFile(io.BytesIO(tail)) as archive:
                members, directory = archive.infolist(), archive.start_dir + first
            break
        except (ValueError, BadZipFile):
            if not first or size_bytes == _TAIL_BYTES[-1]:
                raise
    for member in members:
        member.header_offset += first
    order = sorted(members, key=lambda member: member.header_offset)
    ends = [*(member.header_offset for member in order[1:]), directory]
    latest = dict(zip(order, ends, strict=True))
    for member, end in latest.items():
        if not 0 <= member.header_offset <= end - _LOCAL.size - member.compress_size:
            raise ValueError(f"{member.filename!r} overlaps another member or ends behind the file")
    return {member: latest[member] for member in members}


def _name(member: ZipInfo) -> bytes:
    return member.orig_filename.encode("utf-8" if member.flag_bits & _UTF_8 else "cp437")


def _contents(member: ZipInfo, end: int, data: bytes) -> tuple[int, bytes]:
    """Return where a member's contents begin in the file, and the first of them, decompressed.

    end: of the member in the file, at the latest. data: the first bytes of its header. Raises
    ValueError if the member can't be where the directory states.
    """
    name = _name(member)
    magic, *_, name_bytes, extra_bytes = _LOCAL.unpack(data[: _LOCAL.size])
    begin = _LOCAL.size + name_bytes + extra_bytes
    start = member.header_offset + begin
    is_there = magic == b"PK\3\4" and start + member.compress_size <= end
    if not is_there or data[_LOCAL.size : _LOCAL.size + name_bytes] != name:
        raise ValueError(f"{member.filename!r} has no header of its name where the directory says")
    head = data[begin : begin + member.compress_size]
    if member.compress_type == ZIP_DEFLATED:
        head = zlib.decompressobj(-15).decompress(head, MAX_HEAD_BYTES)
    return start, head


def _refusal(member: ZipInfo) -> str | None:
    """Return why a member can't be read as an array; None if it may be readable.

    Raises ValueError if the directory contradicts itself.
    """
    is_packed, size_bytes = member.compress_type == ZIP_DEFLATED, member.file_size
    if member.flag_bits & _ENCRYPTED or not (is_packed or member.compress_type == ZIP_STORED):
        return "it is encrypted, or its compression isn't numpy's: write it with np.savez"
    stored = member.compress_size
    if size_bytes > _MAX_RATIO * (stored + 1) if is_packed else size_bytes != stored:
        raise ValueError(
            f"{member.filename!r} claims {size_bytes:,} bytes, stored as {stored:,}, which is "
            "impossible"
        )
    if not member.filename.endswith(".npy"):
        return "its name doesn't end in .npy, so it is no array"
    if is_packed and size_bytes > MAX_CHUNK_BYTES:
        return (
            f"a compressed array is decoded as a whole, and this one takes {size_bytes:,} bytes, "
            f"more than {MAX_CHUNK_BYTES:,}: write it with np.savez, which doesn't compress"
        )
    return None


def read_groups(origin: Origin, entries: Sequence[Entry], *, workers: int) -> list[ArrayGroup]:
    """Read the headers of all files and return their arrays. Raises ConfigError, DatasetError or
    FetchError."""
    places, url = dict(origin.arrangement.places), origin.url
    if extension(entries[0].name) == "npz":
        members = {name: place.removesuffix(".npy") for name, place in places.items()}
        read = partial(_read_archive, origin)
        archives = ordered(read, entries, workers=workers, ahead=2 * workers, name="footers")
        groups = []
        for entry, found in zip(entries, archives, strict=True):
            arrays, left_out = chosen_arrays(
                found,
                members,
                lambda member: (member,),
                where=f"{printable(entry.name)} of {url}",
                hint="Write numbers with np.savez, or remove the file from the dataset.",
            )
            groups.append(ArrayGroup(name=entry.name, arrays=arrays, left_out=left_out))
        return groups
    fields = _files_of(entries, places, url=url)
    named = [file for files in fields.values() for file in files]
    stored = dict(zip(named, read_arrays(origin, named, workers=workers), strict=True))
    return [
        ArrayGroup(
            name=files[0].name,
            arrays={name: stored[file] for name, file in zip(fields, files, strict=True)},
        )
        for files in zip(*fields.values(), strict=True)
    ]


def _files_of(
    entries: Sequence[Entry], places: Mapping[str, str], *, url: str
) -> dict[str, list[Entry]]:
    """Return the files of each field, as many for each."""
    if not places:
        return {FIELD: list(entries)}
    fields = {}
    for name, pattern in places.items():
        matches = [e for e in entries if fnmatch.fnmatchcase(os.fsdecode(e.name), pattern)]
        if not matches:
            raise ConfigError(
                f'fields: got {{"{name}": {pattern!r}}}, and the pattern matches no file of {url}. '
                f"One of its files is {printable(entries[0].name)}."
            )
        fields[name] = matches
    counts = {name: len(files) for name, files in fields.items()}
    if len(set(counts.values())) > 1:
        raise ConfigError(
            f"fields: the patterns match different numbers of files ({counts}). The files of two "
            "fields are matched one to one, sorted by name."
        )
    return fields


def choose_samples(
    origin: Origin, groups: Sequence[ArrayGroup]
) -> tuple[Schema, list[ArrayGroup], bool, dict[str, LeftOut]]:
    """Choose what a sample is.

    Returns the schema, the arrays with their windows, whether each file is one sample, and the
    files that don't fill one sample, see `Candidates.unnamed`. Raises ConfigError, DatasetError
    (the files don't belong to one dataset) or DatasetNotFoundError (there are no samples).
    """
    url, sampling = origin.url, Sampling.of(origin.arrangement)
    groups, is_by_file = _unit(url, groups, sampling)
    first, types = groups[0], origin.arrangement.schema
    sampling.check_arrays(_shapes(first), types, url=url)
    for group in groups[1:]:
        _check_alike(first, group, is_by_file=is_by_file)
    groups = [_windowed(group, list(first.arrays), sampling, is_by_file) for group in groups]
    nonempty = [group for group in groups if group.samples]
    stored = {
        name: (array.codec.native, _sample_shape(name, nonempty or groups))
        for name, array in first.arrays.items()
    }
    total = sum(group.samples for group in nonempty)
    what = f"{url}: the dataset, with {_shown(first)} in {printable(first.name)},"
    schema = array_schema(stored, types, total, url=url, what=what)
    log.info(
        "%s: %d files of arrays, %d samples, which are %s; %s",
        url,
        len(groups),
        total,
        "files" if is_by_file else "windows" if sampling.sample else "rows",
        'sample="row" makes each step along the first axis a sample' if is_by_file else _FILE_HINT,
    )
    short = {
        group.name: any(array.numbers_bytes for array in group.arrays.values())
        for group in groups
        if not group.samples
    }
    too_short = left_out_for("an array too short for one sample", short)
    return schema, nonempty, is_by_file, too_short


def _unit(
    url: str, groups: Sequence[ArrayGroup], sampling: Sampling
) -> tuple[Sequence[ArrayGroup], bool]:
    """Return the arrays that can have samples, and whether each file is one sample.

    If the user doesn't say, an archive is one sample if its arrays differ in the length of their
    first axis, or if there are several archives and some arrays are single numbers (one per file,
    as labels are).
    """
    if sampling.unit == "file":
        return groups, True
    are_archives = len({array.entry.name for array in groups[0].arrays.values()}) == 1
    if are_archives and sampling.unit != "row" and not sampling.sample:
        for group in groups:
            shapes = _shapes(group).values()
            lengths = {shape[0] for shape in shapes if shape}
            if len(lengths) > 1 or (len(groups) > 1 and lengths and () in shapes):
                log.warning(
                    "%s: each file is one sample, because the arrays of an archive differ in the "
                    'length of their first axis (%s: %s). Pass sample="file" to confirm this, or '
                    'sample="row" and only arrays of one length, fields={"x": "x"}.',
                    url,
                    printable(group.name),
                    _shown(group),
                )
                return groups, True
    return [_rows_only(group) for group in groups], False


def _rows_only(group: ArrayGroup) -> ArrayGroup:
    """Return a group without its single numbers, which have no rows. Raises DatasetError if rows
    can't be read."""
    arrays = {name: array for name, array in group.arrays.items() if array.shape}
    if not arrays:
        raise DatasetError(
            f"{printable(group.name)}: the file holds single numbers (shape ()), which have no "
            f"first axis for samples. Write arrays; {_FILE_HINT}."
        )
    for name, array in arrays.items():
        if array.is_fortran and array.packed is None:
            raise DatasetError(
                f"{printable(array.entry.name)}: {name!r} of shape {array.shape} is stored "
                "column by column (Fortran order), so its samples aren't contiguous. Write "
                f"np.ascontiguousarray(…). Whole files can be read: {_FILE_HINT}."
            )
    single = dict.fromkeys(group.arrays.keys() - arrays.keys(), "it is a single number")
    return replace(group, arrays=arrays, left_out={**group.left_out, **single})


def _check_alike(first: ArrayGroup, group: ArrayGroup, *, is_by_file: bool) -> None:
    """Raise DatasetError if a file can't belong to the same dataset as the first one."""
    if set(first.arrays) != set(group.arrays):
        raise DatasetError(
            f"{printable(group.name)}: the file holds {sorted(group.arrays)[:20]}, and "
            f"{printable(first.name)} holds {sorted(first.arrays)[:20]}. All files of a dataset "
            'hold the same arrays: name those that all have, fields={"x": "x"}.'
        )
    for name, array in group.arrays.items():
        other, shapes = first.arrays[name], (array.shape, first.arrays[name].shape)
        alike = {len(shape) if is_by_file else shape[1:] for shape in shapes}
        if len(alike) == 1 and array.codec.native == other.codec.native:
            continue
        files = "" if array.entry == other.entry else ' or one field: fields={"x": "x.npy", …}'
        raise DatasetError(
            f"{printable(array.entry.name)}: {name!r} is {array.codec.name} of shape "
            f"{array.shape}, and {other.codec.name} of shape {other.shape} in "
            f"{printable(other.entry.name)}. The files of a dataset have one dtype, and "
            f"{'as many axes' if is_by_file else 'rows of one shape'}; {_FILE_HINT}{files}."
        )


def _windowed(
    group: ArrayGroup, names: Sequence[str], sampling: Sampling, is_by_file: bool
) -> ArrayGroup:
    """Return a group with its arrays in this order, and with the windows that are its samples."""
    group = replace(group, arrays={name: group.arrays[name] for name in names})
    if is_by_file:
        windows = {name: _whole(shape) for name, shape in _shapes(group).items()}
    else:
        where, hint = printable(group.name), f'fields={{"x": "x"}}; {_FILE_HINT}'
        shapes = _shapes(group)
        windows = matched_windows(shapes, sampling, where=where, hint=hint, may_be_short=True)
    return replace(group, windows=windows)


def _whole(shape: tuple[int, ...]) -> ArrayWindows:
    """Return the windows of an array that is one sample as a whole."""
    if not shape:  # a single number: the only step of an axis of length 1
        return ArrayWindows(shape=(1,), window=(1,), stride=(1,), is_step=True)
    return ArrayWindows(shape=shape, window=shape, stride=tuple(max(1, part) for part in shape))


def _sample_shape(name: str, groups: Sequence[ArrayGroup]) -> tuple[int | None, ...]:
    """Return the shape of a field's samples; None for a length that differs. Raises
    DatasetError."""
    shapes = {group.windows[name].sample_shape for group in groups}
    axes = map(set, zip(*shapes, strict=True))
    shape = tuple(min(lengths) if len(lengths) == 1 else None for lengths in axes)
    if 0 in shape:
        raise DatasetError(
            f"{printable(groups[0].name)}: the samples of {name!r} are empty, of shape {shape}. "
            "Remove the file from the dataset, or name other arrays: fields=."
        )
    return shape


def _shapes(group: ArrayGroup) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in group.arrays.items()}


def _shown(group: ArrayGroup) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in list(_shapes(group).items())[:5])
