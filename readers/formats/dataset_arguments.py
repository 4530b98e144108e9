"""Check the arguments of a dataset that define one sample of an array or of a stream of tokens:
`sample=`, `stride=`, `dtype=`, `documents=` and `vocabulary=`, and hold them as a value.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np

from penstock.cache import ConfigError, DatasetError
from penstock.readers.fieldtypes import MAX_FIELDS, FieldTypes, check_field_name

if TYPE_CHECKING:
    from penstock.readers.formats.format import Format
    from penstock.readers.origin import Arrangement

Window = tuple[int | None, ...]
"""The lengths of a part of an array, by axis; None is the whole axis."""

DocumentMode = Literal["across", "within", "pack"]
"""The relation of token sequences to documents: sequences run across the borders of documents, end
at them, or hold several whole documents."""

Unit = Literal["file", "row"]
"""A sample is a whole file, or one step along the first axis of the file's content."""

WindowArgument = Unit | Sequence[int | None] | Mapping[str, Sequence[int | None]]

ALL_FIELDS = ""
"""In place of a field's name: the value applies to all arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The definition of one sample of arrays, or of a stream of tokens.

    sample: lengths of a window, by field, or for all under ALL_FIELDS; empty for one step along the
    first axis. stride: steps from one window to the next, by axis, None for the window's length;
    keys as in sample. dtype: numpy's name of the numbers, for files that don't record it.
    documents: how sequences of tokens relate to documents; None for the format's default.
    vocabulary: upper bound of token ids, exclusive. unit: the unit of a sample, if `sample=` names
    one.
    """

    sample: Mapping[str, Window] = field(default_factory=dict)
    stride: Mapping[str, Window] = field(default_factory=dict)
    dtype: str | None = None
    documents: DocumentMode | None = None
    vocabulary: int | None = None
    unit: Unit | None = None

    def window(self, name: str) -> Window | None:
        """Return the window of one field; None for one step along its first axis."""
        return self.sample.get(name, self.sample.get(ALL_FIELDS))

    def step(self, name: str) -> Window | None:
        """Return the stride of one field; None for adjacent windows."""
        return self.stride.get(name, self.stride.get(ALL_FIELDS))

    def arguments(self) -> dict[str, Any]:
        """Return the values as arguments of a dataset."""
        return {
            "sample": self.unit or self.sample.get(ALL_FIELDS) or dict(self.sample),
            "stride": self.stride.get(ALL_FIELDS) or dict(self.stride),
            "dtype": self.dtype,
            "documents": self.documents,
            "vocabulary": self.vocabulary,
        }

    def check_used(self, format: Format, *, url: str) -> None:
        """Raise ConfigError if a format would ignore an argument."""
        for name, value in self.arguments().items():
            use = "file" if value == "file" else name
            if value and value != "row" and use not in format.sampling:
                raise ConfigError(
                    f"{name}: got {value!r}, but {url} has the format {format.name!r}, which "
                    "doesn't use it. Leave it out, or pass format= if the format is another one."
                )

    def check_arrays(
        self, shapes: Mapping[str, tuple[int, ...]], types: FieldTypes, *, url: str
    ) -> None:
        """Check that arrays can be the fields of a dataset.

        shapes: of the arrays, by name. types: that the user gives, by name. Raises DatasetError if
        there are too many arrays; ConfigError if an argument names another array, or if the window
        has more axes than any array.
        """
        if len(shapes) > MAX_FIELDS:
            raise DatasetError(
                f"{url}: it has {len(shapes):,} arrays that can be fields, expected at most "
                f"{MAX_FIELDS:,}. Name those that you want: fields={{name: array}}."
            )
        if unknown := sorted({*self.sample, *self.stride, *types} - {ALL_FIELDS, *shapes}):
            raise ConfigError(
                f"{url}: sample=, stride= or schema= names {unknown[0]!r}, and its arrays are "
                f"{list(shapes)[:20]}."
            )
        axes = max(map(len, shapes.values()))
        window = self.sample.get(ALL_FIELDS, ())
        if len(window) > axes:
            raise ConfigError(
                f"sample: got {window}, with {len(window)} axes, but the arrays of {url} have at "
                f"most {axes}. Give a length for each axis, including the first."
            )

    def to_json(self) -> str:
        """Return JSON that is different for different values; "" for the default."""
        if self == DEFAULT_SAMPLING:
            return ""
        values = [dict(self.sample), dict(self.stride), self.dtype, self.documents, self.vocabulary]
        return json.dumps(values if self.unit is None else [*values, self.unit])

    @classmethod
    def of(cls, arrangement: Arrangement) -> Sampling:
        """Return the sampling of an arrangement."""
        return arrangement.sampling or DEFAULT_SAMPLING


DEFAULT_SAMPLING = Sampling()
"""The default: a sample is one step along the first axis, a document, or a row."""


def check_sampling(
    sample: WindowArgument | None = None,
    stride: WindowArgument | None = None,
    dtype: str | None = None,
    documents: str | None = None,
    vocabulary: int | None = None,
) -> Sampling:
    """Return checked arguments of a dataset as a Sampling. Raises ConfigError for impossible
    values."""
    if documents is not None and documents not in get_args(DocumentMode):
        raise ConfigError(
            f"documents: got {documents!r}, wanted one of {list(get_args(DocumentMode))}."
        )
    if vocabulary is not None and (type(vocabulary) is not int or vocabulary < 1):
        raise ConfigError(f"vocabulary: got {vocabulary!r}, wanted the number of token ids.")
    unit: Unit | None = sample if sample in ("file", "row") else None
    windows = _windows("sample", None if unit else sample)
    strides = _windows("stride", stride)
    for name, step in strides.items():
        window = windows.get(name, windows.get(ALL_FIELDS))
        if window is None or len(step) > len(window):
            raise ConfigError(
                f"stride: got {step} for {name or 'all arrays'}, but sample= is {window}. A stride "
                "needs a window of at least as many axes: pass both."
            )
    found = Sampling(sample=windows, stride=strides, dtype=_dtype(dtype), unit=unit)
    return replace(found, documents=cast("DocumentMode | None", documents), vocabulary=vocabulary)


def _windows(what: str, given: WindowArgument | None) -> dict[str, Window]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return {ALL_FIELDS: _window(what, given)}
    for name in given:
        check_field_name(name, what=what)
    return {name: _window(f'{what}["{name}"]', window) for name, window in given.items()}


def _window(what: str, given: object) -> Window:
    lengths = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
    plain = [int(each) if isinstance(each, np.integer) else each for each in lengths]
    if not plain or any(each is not None and (type(each) is not int or each < 1) for each in plain):
        raise ConfigError(
            f"{what}: got {given!r}, wanted a length of at least 1 for each axis, or None for a "
            "whole axis, such as (8, None, 256, 256)."
        )
    if plain[0] is None:
        raise ConfigError(
            f"{what}: got {given!r}: samples are taken along the first axis, so its length must be "
            "a number, such as 1."
        )
    return tuple(plain)


def _dtype(given: Any) -> str | None:
    if given is None:
        return None
    try:
        dtype = np.dtype(given)
    except (TypeError, ValueError):
        dtype = np.dtype(object)
    if dtype.kind not in "biufc" or not dtype.isnative:
        raise ConfigError(f'dtype: got {given!r}, wanted the dtype of a number, such as "uint16".')
    return str(dtype.name)


ManifestFile = str | os.PathLike[str] | Literal[False]
"""A table of samples: a name below the dataset's root, or a path on this machine. False uses no
table, not even one in the dataset."""
