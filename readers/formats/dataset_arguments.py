"""Check the arguments with which users describe a dataset, and hold them as values.

`fields=`, `manifest=` and `schema=` say where the fields lie and of which types they are
(`Arrangement`); `sample=`, `stride=`, `dtype=`, `documents=` and `vocabulary=` say what of arrays
and of streams of tokens is one sample (`Sampling`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

import numpy as np

from penstock.cache import ConfigError
from penstock.readers.fields import FIELD_TYPES, FieldType, check_field_name, from_json, to_json
from penstock.readers.origin import NO_TABLE, Arrangement, local_path, show, status_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.readers.origin import Origin, Url

Window = tuple[int | None, ...]
"""Lengths of a part of an array, by axis; None is all of that axis."""

DocumentMode = Literal["across", "within", "pack"]
"""Sequences of tokens run across the borders of documents, end at them, or hold several whole
ones."""

Unit = Literal["file", "row"]
"""A sample is a whole file, or one step along the first axis of what a file holds."""

WindowArgument = Unit | Sequence[int | None] | Mapping[str, Sequence[int | None]]

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
    documents: DocumentMode | None = None
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
        if self == DEFAULT_SAMPLING:
            return ""
        told = [dict(self.sample), dict(self.stride), self.dtype, self.documents, self.vocabulary]
        return json.dumps(told if self.unit is None else [*told, self.unit])

    @classmethod
    def of(cls, arrangement: Arrangement) -> Sampling:
        """What an arrangement says."""
        if not arrangement.sampling:
            return DEFAULT_SAMPLING
        sample, stride, dtype, documents, vocabulary, *unit = json.loads(arrangement.sampling)
        return cls(
            sample={name: tuple(window) for name, window in sample.items()},
            stride={name: tuple(window) for name, window in stride.items()},
            dtype=dtype,
            documents=documents,
            vocabulary=vocabulary,
            unit=unit[0] if unit else None,
        )


DEFAULT_SAMPLING = Sampling()
"""Nothing is said: a sample is one step along the first axis, a document, a row."""


def check_sampling(
    *,
    sample: WindowArgument | None = None,
    stride: WindowArgument | None = None,
    dtype: str | None = None,
    documents: str | None = None,
    vocabulary: int | None = None,
) -> Sampling:
    """What arguments of a dataset say. Raises ConfigError for what can't be."""
    if documents is not None and documents not in get_args(DocumentMode):
        raise ConfigError(
            f"documents: got {documents!r}, wanted one of {list(get_args(DocumentMode))}."
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
        documents=cast("DocumentMode | None", documents),
        vocabulary=vocabulary,
        unit=unit,
    )


def _windows(what: str, given: WindowArgument | None) -> dict[str, Window]:
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


ManifestFile = str | os.PathLike[str] | Literal[False]
"""A table of samples: a name below the dataset's root, or a path of this machine; False is none,
not even one that lies there."""


def arrangement_of(
    url: Url,
    *,
    manifest: ManifestFile | None = None,
    fields: Iterable[str] | Mapping[str, str | None] | None = None,
    schema: Mapping[str, FieldType] | None = None,
    filesystem: Any | None = None,
    sampling: Sampling = DEFAULT_SAMPLING,
    allow_empty: bool = False,
    max_pixels: int | None = None,
) -> Arrangement:
    """The arrangement that arguments of a dataset say. Raises ConfigError."""
    if type(allow_empty) is not bool:
        raise ConfigError(f"allow_empty: got {allow_empty!r}, wanted True or False.")
    if max_pixels is not None and (type(max_pixels) is not int or max_pixels < 1):
        raise ConfigError(
            f"max_pixels: got {max_pixels!r}, wanted the pixels of the largest image, such as "
            "200_000_000."
        )
    return Arrangement(
        manifest=_manifest(url, manifest, is_path=filesystem is not None),
        places=_places(fields),
        schema=_schema(schema),
        sampling=sampling.to_json(),
        allow_empty=allow_empty,
        max_pixels=max_pixels,
    )


def given_types(arrangement: Arrangement) -> dict[str, FieldType]:
    """The types of fields that the user gave."""
    told = json.loads(arrangement.schema) if arrangement.schema else []
    return {
        each["name"]: from_json({k: v for k, v in each.items() if k != "name"}) for each in told
    }


def are_default_names(format: str, origin: Origin) -> bool:
    """Whether the places of fields are names that the fields have without a word, as nothing lies
    at any of them. format: of the data; tables, arrays and stores have columns and paths there."""
    places = [place for _, place in origin.arrangement.places]
    if format == "tokens":
        return True
    if format == "tar":
        return all(place in MEMBER_NAMES for place in places)
    if format != "folder" or origin.arrangement.manifest or origin.selection is not None:
        return False
    folders = {os.fsdecode(name) for name in origin.names().folders}
    tops = [place.removeprefix("./").partition("/")[0] for place in places]
    return not any("*" in place for place in places) and folders.isdisjoint(tops)


MEMBER_NAMES = frozenset(("image", "audio", "video", "caption", "array", "label"))
"""What the members of a tar file are called as fields, where they have no name of their own."""


def renamed_arrangement(arrangement: Arrangement, names: Mapping[str, str]) -> Arrangement:
    """What a user says of data whose fields get other names, as of the data as they lie. names: of
    fields, each with that which the data have."""
    types = json.loads(arrangement.schema) if arrangement.schema else []
    for each in types:
        each["name"] = names.get(each["name"], each["name"])
        if each.get("of") is not None:
            each["of"] = names.get(each["of"], each["of"])
    return replace(arrangement, places=(), schema=json.dumps(types) if types else "")


def _schema(schema: Mapping[str, Any] | None) -> str:
    if not schema:
        return ""
    if not isinstance(schema, Mapping):
        raise ConfigError(
            f'schema: got {schema!r}, wanted types by field, such as {{"boxes": '
            'Boxes(of="image")}.'
        )
    for name, type in schema.items():
        check_field_name(name, what="schema")
        if not isinstance(type, tuple(FIELD_TYPES.values())):
            raise ConfigError(
                f'schema["{name}"]: got {type!r}, wanted a field type such as Image() or '
                'Array("float32", (3,)).'
            )
    return json.dumps([{"name": name, **to_json(type)} for name, type in schema.items()])


def _places(fields: Iterable[str] | Mapping[str, str | None] | None) -> tuple[tuple[str, str], ...]:
    """Where fields lie; none where names alone are told."""
    if not isinstance(fields, Mapping):
        return ()
    places = {name: place for name, place in fields.items() if place is not None}
    for name, place in places.items():
        check_field_name(name, what="fields")
        if not isinstance(place, str):
            raise ConfigError(
                f'fields["{name}"]: got {place!r}, wanted a folder such as "images", a pattern '
                'such as "masks/*_mask.png", or a column of the manifest.'
            )
    return tuple(places.items())


def _manifest(url: Url, manifest: ManifestFile | None, *, is_path: bool) -> str | None:
    if manifest is None:
        return None
    if manifest is False:
        return NO_TABLE
    told = os.fspath(manifest) if isinstance(manifest, str | os.PathLike) else None
    if not isinstance(told, str) or not told or "\0" in told:
        raise ConfigError(
            f"manifest: got {manifest!r}, wanted a table such as list.csv or list.jsonl, or False."
        )
    if isinstance(url, list | tuple):
        raise ConfigError(
            f"manifest: a table lists the files of a folder, and a list of {len(url):,} files is "
            "given. Leave one out."
        )
    path = local_path(told)
    if path is None:
        root = str(url).rstrip("/") + "/"
        if is_path or not told.startswith(root):
            raise ConfigError(
                f"manifest: got {show(told)}, wanted a name below {show(url)}, or a path of this "
                "machine: fetch it from there."
            )
        return told[len(root) :]
    named = os.fsdecode(path)
    root_path = None if is_path else local_path(url)
    if os.path.isabs(named):
        return _below(named, root_path)
    if root_path is None:
        is_here = not isinstance(manifest, str) or named.startswith(("./", "../"))
        return os.path.abspath(named) if is_here else os.path.normpath(named)
    inside, here = os.path.join(os.fsdecode(root_path), named), os.path.abspath(named)
    there = [each for each in (inside, here) if status_of(each) is not None]
    if len(there) == 2 and not os.path.samefile(*there):
        raise ConfigError(
            f"manifest: got {named!r}, and both {inside} and {here} are there. Give an absolute "
            "path."
        )
    if not there:
        raise ConfigError(f"manifest: got {named!r}, and neither {inside} nor {here} is there.")
    return _below(os.path.abspath(there[0]), root_path)


def _below(path: str, root: bytes | None) -> str:
    """A name below a local dataset's root where the path is one, so that it goes with the data."""
    if root is None:
        return path
    inside = os.path.abspath(os.fsdecode(root)).rstrip("/") + "/"
    return path[len(inside) :] if path.startswith(inside) else path
