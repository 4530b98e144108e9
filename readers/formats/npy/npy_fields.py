"""Choose the fields of a dataset of NumPy files, and what one sample is.

The arrays of one archive belong together, and so do the files of several fields that are matched by
name. A sample is a row, a window of rows, or a whole file.
"""

from __future__ import annotations

import fnmatch
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.fieldtypes import Schema, is_field_name
from penstock.readers.files import extension, printable
from penstock.readers.formats.array_fields import check_samples, field_type, matched_windows
from penstock.readers.formats.array_windows import ArrayWindows
from penstock.readers.formats.dataset_arguments import Sampling, given_types
from penstock.readers.formats.npy.stored_arrays import ArrayGroup, read_archives, read_arrays
from penstock.readers.origin import left_out_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.origin import Entry, LeftOut, Origin

_log = logging.getLogger("penstock")

FIELD = "array"
"""The field's name of arrays in .npy files."""

_FILE_HINT = 'sample="file" makes each file one sample'


class ChosenArrays(NamedTuple):
    """The schema and the arrays of a dataset, with their windows.

    is_by_file: a file is one sample. too_short: files that don't fill one sample, see `Candidates`.
    """

    schema: Schema
    groups: Sequence[ArrayGroup]
    is_by_file: bool
    too_short: Mapping[str, LeftOut]


def read_groups(origin: Origin, entries: Sequence[Entry], *, workers: int) -> list[ArrayGroup]:
    """Read the headers of all files and return their arrays. Raises ConfigError, DatasetError or
    FetchError."""
    places, url = dict(origin.arrangement.places), origin.url
    if extension(entries[0].name) == "npz":
        archives = read_archives(origin, entries, workers=workers)
        return [_archive_fields(archive, places, url=url) for archive in archives]
    fields = _files_of(entries, places, url=url)
    named = [file for files in fields.values() for file in files]
    arrays = dict(zip(named, read_arrays(origin, named, workers=workers), strict=True))
    return [
        ArrayGroup(
            name=files[0].name,
            arrays={name: arrays[file] for name, file in zip(fields, files, strict=True)},
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


def _archive_fields(archive: ArrayGroup, places: Mapping[str, str], *, url: str) -> ArrayGroup:
    """Return the arrays of an archive that are fields: those that the user names, or all."""
    shown = printable(archive.name)
    arrays, refused = dict(archive.arrays), dict(archive.left_out)
    if places:
        members = {name: member.removesuffix(".npy") for name, member in places.items()}
        for name, member in members.items():
            if member in refused:
                raise DatasetError(f"{shown}: {member!r} can't be read: {refused[member]}.")
            if member not in arrays:
                raise ConfigError(
                    f'fields: got {{"{name}": {places[name]!r}}}, and {shown} of {url} has no such '
                    f"array. It has {sorted(arrays)[:20]}."
                )
        named = {name: arrays[member] for name, member in members.items()}
        return ArrayGroup(name=archive.name, arrays=named)
    for name in [name for name in arrays if not is_field_name(name)]:
        refused[name] = "no field can have its name: pass fields={name: member}"
        del arrays[name]
    if not arrays:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(refused.items())[:5])
        raise DatasetError(
            f"{shown}: none of its arrays can be read ({reasons or 'it is empty'}). Write numbers "
            "with np.savez, or remove the file from the dataset."
        )
    for name, reason in refused.items():
        _log.info("%s: %s of %s isn't a field: %s", url, name, shown, reason)
    return ArrayGroup(name=archive.name, arrays=arrays, left_out=refused)


def choose_samples(origin: Origin, groups: Sequence[ArrayGroup]) -> ChosenArrays:
    """Choose what a sample is.

    Raises ConfigError, DatasetError (the files don't belong to one dataset) or DatasetNotFoundError
    (there are no samples).
    """
    url, sampling = origin.url, Sampling.of(origin.arrangement)
    groups, is_by_file = _unit(url, groups, sampling)
    first, types = groups[0], given_types(origin.arrangement)
    sampling.check_arrays(_shapes(first), types, url=url)
    for group in groups[1:]:
        _check_alike(first, group, is_by_file=is_by_file)
    groups = [_windowed(group, list(first.arrays), sampling, is_by_file) for group in groups]
    nonempty = [group for group in groups if group.samples]
    if not nonempty:
        raise DatasetNotFoundError(
            f"{url}: there are no samples: {printable(first.name)} holds {_shown(first)}. "
            f"Samples run along the first axis; {_FILE_HINT}."
        )
    total = sum(group.samples for group in nonempty)
    check_samples(total, what=f"{url}: the dataset")
    schema = {}
    for name, array in first.arrays.items():
        shape = _sample_shape(name, nonempty)
        schema[name] = field_type(types.get(name), array.codec.native, shape, name=name, url=url)
    _log.info(
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
    return ChosenArrays(Schema(schema), nonempty, is_by_file, too_short)


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
                _log.warning(
                    "%s: each file is one sample, because the arrays of an archive differ in the "
                    'length of their first axis (%s: %s). Pass sample="file" to confirm this, or '
                    'sample="row" and only arrays of one length, fields={"x": "x"}.',
                    url,
                    printable(group.name),
                    _shown(group),
                )
                return groups, True
    return [_rows_only(url, group) for group in groups], False


def _rows_only(url: str, group: ArrayGroup) -> ArrayGroup:
    """Return a group without its single numbers, which have no rows. Raises DatasetError if rows
    can't be read."""
    arrays = {name: array for name, array in group.arrays.items() if array.shape}
    if not arrays:
        raise DatasetError(
            f"{printable(group.name)}: the file holds single numbers (shape ()), which have no "
            f"first axis for samples. Write arrays; {_FILE_HINT}."
        )
    for name in group.arrays.keys() - arrays.keys():
        _log.info("%s: %s of %s isn't a field: a single number", url, name, printable(group.name))
    for name, array in arrays.items():
        if array.is_fortran and array.packed is None:
            raise DatasetError(
                f"{printable(array.entry.name)}: {name!r} of shape {array.shape} is stored "
                "column by column (Fortran order), so its samples aren't contiguous. Write "
                f"np.ascontiguousarray(…). Whole files can be read: {_FILE_HINT}."
            )
    return replace(group, arrays=arrays)


def _check_alike(first: ArrayGroup, group: ArrayGroup, *, is_by_file: bool) -> None:
    """Raise DatasetError if a file can't belong to the same dataset as the first one."""
    if set(first.arrays) != set(group.arrays):
        raise DatasetError(
            f"{printable(group.name)}: the file holds {sorted(group.arrays)[:20]}, and "
            f"{printable(first.name)} holds {sorted(first.arrays)[:20]}. All files of a dataset "
            'hold the same arrays: name those that all have, fields={"x": "x"}.'
        )
    for name, array in group.arrays.items():
        other = first.arrays[name]
        if is_by_file:
            is_alike, rule = len(array.shape) == len(other.shape), "the same number of axes"
        else:
            is_alike, rule = array.shape[1:] == other.shape[1:], "rows of one shape"
        if is_alike and array.codec.native == other.codec.native:
            continue
        files = "" if array.entry == other.entry else ' or one field: fields={"x": "x.npy", …}'
        raise DatasetError(
            f"{printable(array.entry.name)}: {name!r} is {array.codec.name} of shape "
            f"{array.shape}, and {other.codec.name} of shape {other.shape} in "
            f"{printable(other.entry.name)}. The files of a dataset have one dtype and {rule}; "
            f"{_FILE_HINT}{files}."
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
        windows = matched_windows(
            _shapes(group), sampling, where=where, hint=hint, may_be_short=True
        )
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
    shape = tuple(
        lengths[0] if len(set(lengths)) == 1 else None for lengths in zip(*shapes, strict=True)
    )
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
