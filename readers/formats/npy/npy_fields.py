"""Decide which arrays belong together, what of them is a sample, and which fields it has.

Arrays of one archive belong together, or the files of several fields. Samples are the rows of all
files, windows, or whole files.
"""

from __future__ import annotations

import fnmatch
import logging
import math
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.fields import (
    MAX_FIELDS,
    Array,
    ClassLabel,
    FieldType,
    Schema,
    Value,
    is_field_name,
)
from penstock.readers.files import extension, is_passed_over, printable
from penstock.readers.formats.array_windows import ArrayWindows, windows_of
from penstock.readers.formats.dataset_arguments import EVERY, Sampling, given_types
from penstock.readers.formats.npy.stored_arrays import read_archives, read_arrays
from penstock.readers.formats.shard_summary import MAX_SAMPLES
from penstock.readers.origin import left_out_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.formats.npy.stored_arrays import StoredArray, StoredFile
    from penstock.readers.origin import Entry, LeftOut, Origin

_log = logging.getLogger("penstock")

FIELD = "array"
"""The field of .npy files."""

EXTENSIONS = frozenset(("npy", "npz"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayGroup:
    """Arrays of the same samples, by field. name: of their file, the first of several. left_out:
    what else is there, and why it is no field."""

    name: bytes
    arrays: Mapping[str, StoredArray]
    left_out: Mapping[str, str] = field(default_factory=dict)


def list_entries(origin: Origin) -> list[Entry]:
    """The files of a dataset, in order. Raises DatasetNotFoundError, ConfigError, FetchError."""
    top = origin.top(_is_ours)
    if origin.selection is not None and top.others:
        raise ConfigError(
            f"{origin.url}: {printable(top.others[0])} isn't called *.npy or *.npz. Name files of "
            "one kind."
        )
    if not top.entries:
        missing = f", and {printable(top.missing[0])} leads nowhere" if top.missing else ""
        raise DatasetNotFoundError(f"{origin.url}: no *.npy or *.npz file is there{missing}.")
    kinds = {extension(entry.name) for entry in top.entries}
    if len(kinds) > 1:
        raise ConfigError(
            f"{origin.url}: holds .npy and .npz files. Name those of one kind, such as "
            f"{origin.url.rstrip('/')}/*.npy."
        )
    return top.entries


def _is_ours(name: bytes) -> bool:
    return extension(name) in EXTENSIONS and not is_passed_over(name.rpartition(b"/")[2])


def read_groups(origin: Origin, entries: Sequence[Entry], *, workers: int) -> list[ArrayGroup]:
    """The arrays of all files, by their headers. Raises ConfigError, DatasetError, FetchError."""
    places = dict(origin.arrangement.places)
    if extension(entries[0].name) == "npz":
        return [
            _members(stored, places, url=origin.url)
            for stored in read_archives(origin, entries, workers=workers)
        ]
    fields = _files_of(entries, places, url=origin.url)
    wanted = [entry for files in fields.values() for entry in files]
    found = dict(zip(wanted, read_arrays(origin, wanted, workers=workers), strict=True))
    return [
        ArrayGroup(
            name=together[0].name,
            arrays={name: found[e] for name, e in zip(fields, together, strict=True)},
        )
        for together in zip(*fields.values(), strict=True)
    ]


def _files_of(
    entries: Sequence[Entry], places: Mapping[str, str], *, url: str
) -> dict[str, list[Entry]]:
    """The files of each field."""
    if not places:
        return {FIELD: list(entries)}
    fields = {}
    for name, pattern in places.items():
        fits = [e for e in entries if fnmatch.fnmatchcase(os.fsdecode(e.name), pattern)]
        if not fits:
            raise ConfigError(
                f'fields: got {{"{name}": {pattern!r}}}, and no file of {url} is called so, such '
                f"as {printable(entries[0].name)}."
            )
        fields[name] = fits
    counts = {name: len(files) for name, files in fields.items()}
    if len(set(counts.values())) > 1:
        raise ConfigError(
            f"fields: the patterns fit different numbers of files ({counts}). Files of one dataset "
            "go together one by one, in the order of their names."
        )
    return fields


def _members(stored: StoredFile, places: Mapping[str, str], *, url: str) -> ArrayGroup:
    """The fields of one archive."""
    shown = printable(stored.entry.name)
    arrays, refused = dict(stored.arrays), dict(stored.refused)
    if places:
        chosen = {}
        for name, member in places.items():
            key = member.removesuffix(".npy")
            if key in refused:
                raise DatasetError(f"{shown}: {member!r} can't be read: {refused[key]}.")
            if key not in arrays:
                raise ConfigError(
                    f'fields: got {{"{name}": {member!r}}}, and {shown} of {url} has no such '
                    f"array. It has {sorted(arrays)[:20]}."
                )
            chosen[name] = arrays[key]
        return ArrayGroup(name=stored.entry.name, arrays=chosen)
    for name in list(arrays):
        if not is_field_name(name):
            refused[name] = "no field can have its name; say fields={name: member}"
            del arrays[name]
    if not arrays:
        told = "; ".join(f"{name}: {why}" for name, why in list(refused.items())[:5])
        raise DatasetError(
            f"{shown}: no array of it can be read ({told or 'it is empty'}). Write numbers with "
            "np.savez, or take the file out of the dataset."
        )
    for name, why in refused.items():
        _log.info("%s: %s of %s isn't a field: %s", url, name, shown, why)
    return ArrayGroup(name=stored.entry.name, arrays=arrays, left_out=refused)


_BY_FILE = 'sample="file" makes each file one sample'


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedGroup:
    """A group and the samples in it. windows: of each field, as many in all."""

    group: ArrayGroup
    windows: Mapping[str, ArrayWindows]

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return next(iter(self.windows.values())).samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenArrays:
    """What a dataset of arrays is. is_by_file: a file is a sample; too_short: files that don't fill
    one, see `Candidates`."""

    schema: Schema
    groups: Sequence[WindowedGroup]
    is_by_file: bool
    too_short: Mapping[str, LeftOut]


def choose_samples(origin: Origin, groups: Sequence[ArrayGroup]) -> ChosenArrays:
    """Decide what a sample is. Raises ConfigError, DatasetError (files that don't go together),
    DatasetNotFoundError (no samples)."""
    sampling = Sampling.of(origin.arrangement)
    groups, is_by_file = _unit(origin.url, groups, sampling)
    fields = list(groups[0].arrays)
    if len(fields) > MAX_FIELDS:
        raise DatasetError(
            f"{origin.url}: it has {len(fields):,} arrays that can be fields, wanted at most "
            f"{MAX_FIELDS:,}. Name those that you want: fields={{name: member}}."
        )
    said = {*sampling.sample, *sampling.stride, *given_types(origin.arrangement)} - {EVERY}
    if unknown := sorted(said - set(fields)):
        raise ConfigError(
            f"{origin.url}: sample=, stride= or schema= names {unknown[0]!r}, and its arrays are "
            f"{fields}."
        )
    axes = max(len(array.shape) for array in groups[0].arrays.values())
    sampling.check_axes(axes, url=origin.url)
    check = _same_files if is_by_file else _same_rows
    for group in groups[1:]:
        check(groups[0], group)
    groups = [replace(g, arrays={name: g.arrays[name] for name in fields}) for g in groups]
    windowed = [_windowed(group, sampling, is_by_file=is_by_file) for group in groups]
    there = [each for each in windowed if each.samples]
    total = sum(each.samples for each in there)
    if not total:
        raise DatasetNotFoundError(
            f"{origin.url}: there are no samples: {printable(groups[0].name)} holds "
            f"{_shapes(groups[0])}. Samples run along the first axis; {_BY_FILE}."
        )
    if total > MAX_SAMPLES:
        raise DatasetError(
            f"{origin.url}: makes {total:,} samples, wanted at most {MAX_SAMPLES:,}. Take longer "
            "strides (stride=)."
        )
    types = given_types(origin.arrangement)
    own = {name: _type(name, there, is_by_file=is_by_file) for name in fields}
    schema = {name: _given(types.get(name), own[name], name, origin.url) for name in fields}
    kind = "files" if is_by_file else "windows" if sampling.sample else "rows"
    _log.info(
        "%s: %d files of arrays, %d samples, which are %s; %s",
        origin.url,
        len(groups),
        total,
        kind,
        'sample="row" makes steps along the first axis samples' if is_by_file else _BY_FILE,
    )
    short = {
        each.group.name: any(array.numbers_bytes for array in each.group.arrays.values())
        for each in windowed
        if not each.samples
    }
    return ChosenArrays(
        schema=Schema(schema),
        groups=there,
        is_by_file=is_by_file,
        too_short=left_out_for("an array too short for one sample", short),
    )


def _unit(
    url: str, groups: Sequence[ArrayGroup], sampling: Sampling
) -> tuple[Sequence[ArrayGroup], bool]:
    """The arrays that can have samples, and whether a file is one. Without a word an
    archive is one where its arrays have no first axis of one length in common."""
    if sampling.unit == "file":
        return groups, True
    is_told = sampling.unit == "row" or bool(sampling.sample)
    are_archives = len({array.entry.name for array in groups[0].arrays.values()}) == 1
    odd = next((group for group in groups if _has_no_rows(group, several=len(groups) > 1)), None)
    if are_archives and not is_told and odd is not None:
        _log.warning(
            "%s: each file is a sample, as the arrays of one have no first axis of one length in "
            'common (%s: %s). Say sample="file"; or sample="row", and name those that have, '
            'fields={"x": "x"}.',
            url,
            printable(odd.name),
            _shapes(odd),
        )
        return groups, True
    found = [_rows_only(url, group) for group in groups]
    for group in found:
        for name, array in group.arrays.items():
            if array.is_fortran and array.packed is None:
                raise DatasetError(
                    f"{printable(array.entry.name)}: {name!r} of shape {array.shape} lies column "
                    "by column (Fortran order), so no sample of it lies together. Write "
                    f"np.ascontiguousarray(…); {_BY_FILE}, which can be read."
                )
    return found, False


def _has_no_rows(group: ArrayGroup, *, several: bool) -> bool:
    """Whether the arrays of an archive differ in their first length, or, where there are several
    archives, some are single numbers: one of each file, as labels are."""
    shapes = [array.shape for array in group.arrays.values()]
    lengths = {shape[0] for shape in shapes if shape}
    return len(lengths) > 1 or (several and bool(lengths) and () in shapes)


def _rows_only(url: str, group: ArrayGroup) -> ArrayGroup:
    """A group without single numbers, which have no rows."""
    arrays = {name: array for name, array in group.arrays.items() if array.shape}
    if not arrays:
        raise DatasetError(
            f"{printable(group.name)}: holds single numbers (shape ()), which have no first axis "
            f"for samples. Write arrays; {_BY_FILE}."
        )
    for name in group.arrays.keys() - arrays.keys():
        _log.info("%s: %s of %s isn't a field: a single number", url, name, printable(group.name))
    return replace(group, arrays=arrays)


def _native(array: StoredArray) -> np.dtype[Any]:
    return array.codec.dtype.newbyteorder("=")


def _same_rows(first: ArrayGroup, group: ArrayGroup) -> None:
    """Raise DatasetError where the rows of two files aren't alike."""
    _check_names(first, group)
    for name, array in group.arrays.items():
        before = first.arrays[name]
        mine, theirs = (_native(array), array.shape[1:]), (_native(before), before.shape[1:])
        if mine != theirs:
            raise _drift(first, group, name, "Rows of one dataset are alike")


def _same_files(first: ArrayGroup, group: ArrayGroup) -> None:
    """Raise DatasetError where two files can't be samples of one dataset."""
    _check_names(first, group)
    for name, array in group.arrays.items():
        before = first.arrays[name]
        mine, theirs = (_native(array), len(array.shape)), (_native(before), len(before.shape))
        if mine != theirs:
            raise _drift(first, group, name, "Samples have a dtype and as many axes in common")


def _check_names(first: ArrayGroup, group: ArrayGroup) -> None:
    if set(first.arrays) != set(group.arrays):
        raise DatasetError(
            f"{printable(group.name)}: holds {sorted(group.arrays)[:20]}, and "
            f"{printable(first.name)} {sorted(first.arrays)[:20]}. Files of one dataset hold the "
            'same arrays: name those that all have, fields={"x": "x"}.'
        )


def _drift(first: ArrayGroup, group: ArrayGroup, name: str, wanted: str) -> DatasetError:
    here, there = group.arrays[name], first.arrays[name]
    files = "" if here.entry == there.entry else ' or a field: fields={"x": "x.npy", …}'
    return DatasetError(
        f"{printable(here.entry.name)}: {name!r} is {_native(here).name} of shape {here.shape}, "
        f"and {_native(there).name} of shape {there.shape} in {printable(there.entry.name)}. "
        f"{wanted}; {_BY_FILE}{files}."
    )


def _windowed(group: ArrayGroup, sampling: Sampling, *, is_by_file: bool) -> WindowedGroup:
    if is_by_file:
        whole = {name: _whole(array.shape) for name, array in group.arrays.items()}
        return WindowedGroup(group=group, windows=whole)
    windows = {
        name: _windows(name, array.shape, sampling, f"{name!r} of {printable(group.name)}")
        for name, array in group.arrays.items()
    }
    lead = max(windows, key=lambda name: (windows[name].samples, len(windows[name].shape)))
    fitted = {name: _fitted(mine, windows[lead]) for name, mine in windows.items()}
    for name, found in fitted.items():
        if found is None:
            raise DatasetError(
                f"{printable(group.name)}: {lead!r} of shape {windows[lead].shape} has "
                f"{windows[lead].samples:,} samples and {name!r} of shape {windows[name].shape} "
                f"{windows[name].samples:,}. Fields of one dataset have as many: name those that "
                f'belong together, fields={{"{lead}": "…"}}; {_BY_FILE}.'
            )
    return WindowedGroup(
        group=group, windows={name: found for name, found in fitted.items() if found is not None}
    )


def _whole(shape: tuple[int, ...]) -> ArrayWindows:
    """The one sample that a file is."""
    if not shape:  # a single number: the one step of an axis
        return ArrayWindows(shape=(1,), window=(1,), stride=(1,), is_step=True)
    return ArrayWindows(shape=shape, window=shape, stride=tuple(max(1, each) for each in shape))


def _windows(name: str, shape: tuple[int, ...], sampling: Sampling, what: str) -> ArrayWindows:
    window, stride = sampling.window(name), sampling.step(name)
    if window is not None and (window[0] or 0) > shape[0]:  # a short file has none
        most = (max(1, shape[0]), *shape[1:])
        return ArrayWindows(shape=(0, *shape[1:]), window=most, stride=(1,) * len(shape))
    return windows_of(shape, window, stride, what=what, is_named=name in sampling.sample)


def _fitted(mine: ArrayWindows, lead: ArrayWindows) -> ArrayWindows | None:
    """The windows of an array, as many as the leading one has; None where they can't be."""
    axes = len(mine.shape)
    if mine.counts == lead.counts[:axes]:
        return replace(mine, repeat=math.prod(lead.counts[axes:]))
    return mine if mine.samples == lead.samples else None


def _type(name: str, groups: Sequence[WindowedGroup], *, is_by_file: bool) -> FieldType:
    """The type of a field as the files have it."""
    dtype = _native(groups[0].group.arrays[name]).name
    shapes = {each.windows[name].sample_shape for each in groups}
    shape: tuple[int | None, ...] = next(iter(shapes))
    if is_by_file:
        shape = tuple(
            lengths[0] if len(set(lengths)) == 1 else None for lengths in zip(*shapes, strict=True)
        )
    if 0 in shape:
        raise DatasetError(
            f"{printable(groups[0].group.name)}: the samples of {name!r} are empty, of shape "
            f"{shape}. Take it out of the dataset, or name other arrays: fields=."
        )
    return Array(dtype, shape) if shape or np.dtype(dtype).itemsize > 8 else Value(dtype)


def _given(given: FieldType | None, own: FieldType, name: str, url: str) -> FieldType:
    """The type that the user says, if it can be. Raises ConfigError."""
    if given is None:
        return own
    assert isinstance(own, Array | Value)
    dtype = np.dtype(own.dtype)
    if isinstance(given, ClassLabel) and isinstance(own, Value) and dtype.kind in "iub":
        return given
    if isinstance(given, Value) and isinstance(own, Value):
        if np.can_cast(dtype, np.dtype(given.dtype), "same_kind"):
            return given
    elif isinstance(given, Array) and isinstance(own, Array):
        found = Array(given.dtype or own.dtype, own.shape if given.shape is None else given.shape)
        if found.shape == own.shape and np.can_cast(dtype, np.dtype(found.dtype), "same_kind"):
            return found
    raise ConfigError(f'schema["{name}"]: got {given!r}, and the samples of {url} are {own!r}.')


def _shapes(group: ArrayGroup) -> str:
    some = list(group.arrays.items())[:5]
    return ", ".join(f"{name} {array.shape}" for name, array in some)
