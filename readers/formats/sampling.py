"""What of arrays and of streams of tokens is one sample, as users say it (`sample=`, `stride=`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

import numpy as np

from penstock.cache.errors import ConfigError
from penstock.readers.fields.field_types import check_field_name

if TYPE_CHECKING:
    from penstock.readers.origin.arrangement import Arrangement

Window = tuple[int | None, ...]
"""Lengths of a part of an array, by axis; None is all of that axis."""

Documents = Literal["across", "within", "pack"]
"""Sequences of tokens run across the borders of documents, end at them, or hold several whole
ones."""

Unit = Literal["file", "row"]
"""A sample is a whole file, or one step along the first axis of what a file holds."""

Windows = Unit | Sequence[int | None] | Mapping[str, Sequence[int | None]]

EVERY = ""
"""In a field's place: what is said holds for all arrays."""


_USED: Final[Mapping[str, tuple[str, ...]]] = {
    "zarr": ("sample", "stride"),
    "npy": ("sample", "stride"),
    "tokens": ("sample", "stride", "dtype", "documents", "vocabulary"),
    **dict.fromkeys(("parquet", "arrow", "folder", "tar", "pack"), ()),
}
"""What of it formats of ours use; other people's know for themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What is one sample of arrays, or of a stream of tokens.

    sample: lengths of a window, by field, or for all under EVERY; none: one step along the first
    axis. stride: from one window to the next, by axis, None where it is the window's length; as
    sample. dtype: numpy's name of the numbers of files that don't tell. documents: how sequences
    of tokens go with their documents; None: the format's default. vocabulary: token ids are below.
    unit: what a sample is, where that is said by a word.
    """

    sample: Mapping[str, Window] = field(default_factory=dict)
    stride: Mapping[str, Window] = field(default_factory=dict)
    dtype: str | None = None
    documents: Documents | None = None
    vocabulary: int | None = None
    unit: Unit | None = None

    def window(self, name: str) -> Window | None:
        """The window of one field; None: one step along its first axis."""
        return self.sample.get(name, self.sample.get(EVERY))

    def step(self, name: str) -> Window | None:
        """The stride of one field; None: windows lie side by side."""
        return self.stride.get(name, self.stride.get(EVERY))

    def arguments(self) -> dict[str, Any]:
        """As arguments of a dataset."""
        return {
            "sample": self.unit or self.sample.get(EVERY) or dict(self.sample),
            "stride": dict(self.stride) if EVERY not in self.stride else self.stride[EVERY],
            "dtype": self.dtype,
            "documents": self.documents,
            "vocabulary": self.vocabulary,
        }

    def check_used(self, format: str, *, url: str) -> None:
        """Raises ConfigError where a format of ours would pass over what was said."""
        used = _USED.get(format)
        said = {
            "sample": bool(self.sample),
            "stride": bool(self.stride),
            "dtype": self.dtype is not None,
            "documents": self.documents is not None,
            "vocabulary": self.vocabulary is not None,
        }
        for name, is_said in said.items():
            if is_said and used is not None and name not in used:
                takers = ", ".join(other for other, names in _USED.items() if name in names)
                raise ConfigError(
                    f"{name}: {url} is of the format {format!r}, which has no use for it. Leave it "
                    f"out, or say format= where it is another (it goes with {takers})."
                )

    def check_axes(self, axes: int, *, url: str) -> None:
        """Raises ConfigError for a window of more axes than any array has. axes: the most."""
        window = self.sample.get(EVERY, ())
        if len(window) > axes:
            raise ConfigError(
                f"sample: got {window}, of {len(window)} axes, and the arrays of {url} have {axes} "
                "at most. Give a length for each axis, the first one's too."
            )

    def to_json(self) -> str:
        """What tells it from others; "" where nothing is said."""
        if self == AS_THEY_COME:
            return ""
        told = [dict(self.sample), dict(self.stride), self.dtype, self.documents, self.vocabulary]
        return json.dumps(told if self.unit is None else [*told, self.unit])

    @classmethod
    def of(cls, arrangement: Arrangement) -> Sampling:
        """What an arrangement says."""
        if not arrangement.sampling:
            return AS_THEY_COME
        sample, stride, dtype, documents, vocabulary, *unit = json.loads(arrangement.sampling)
        return cls(
            sample={name: tuple(window) for name, window in sample.items()},
            stride={name: tuple(window) for name, window in stride.items()},
            dtype=dtype,
            documents=documents,
            vocabulary=vocabulary,
            unit=unit[0] if unit else None,
        )


AS_THEY_COME = Sampling()
"""Nothing is said: a sample is one step along the first axis, a document, a row."""


def check_sampling(
    *,
    sample: Windows | None = None,
    stride: Windows | None = None,
    dtype: str | None = None,
    documents: str | None = None,
    vocabulary: int | None = None,
) -> Sampling:
    """What arguments of a dataset say. Raises ConfigError for what can't be."""
    if documents is not None and documents not in get_args(Documents):
        raise ConfigError(
            f"documents: got {documents!r}, wanted one of {list(get_args(Documents))}."
        )
    if vocabulary is not None and (type(vocabulary) is not int or vocabulary < 1):
        raise ConfigError(f"vocabulary: got {vocabulary!r}, wanted how many token ids there are.")
    unit: Unit | None = sample if sample in ("file", "row") else None
    windows = _windows("sample", None if unit else sample)
    strides = _windows("stride", stride)
    for name, step in strides.items():
        window = windows.get(name, windows.get(EVERY))
        if window is None or len(step) > len(window):
            raise ConfigError(
                f"stride: got {step} for {name or 'all arrays'}, and sample= says {window}. A "
                "stride goes with a window of as many axes or more: pass both."
            )
    return Sampling(
        sample=windows,
        stride=strides,
        dtype=_dtype(dtype),
        documents=cast("Documents | None", documents),
        vocabulary=vocabulary,
        unit=unit,
    )


def _windows(what: str, given: Windows | None) -> dict[str, Window]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return {EVERY: _window(what, given)}
    for name in given:
        check_field_name(name, what=what)
    return {name: _window(f'{what}["{name}"]', window) for name, window in given.items()}


def _window(what: str, given: object) -> Window:
    lengths = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
    plain = [int(each) if isinstance(each, np.integer) else each for each in lengths]
    if not plain or any(each is not None and (type(each) is not int or each < 1) for each in plain):
        raise ConfigError(
            f"{what}: got {given!r}, wanted a length of at least 1 for each axis, or None for all "
            "of it, such as (8, None, 256, 256)."
        )
    if plain[0] is None:
        raise ConfigError(
            f"{what}: got {given!r}: the first axis is what samples are taken along; wanted a "
            "number there, such as 1."
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
        raise ConfigError(f'dtype: got {given!r}, wanted a number\'s, such as "uint16".')
    return str(dtype.name)
