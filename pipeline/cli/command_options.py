"""Declare the options that several commands share, and parse them."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from typer import Argument, Option

from penstock.cache import ConfigError

if TYPE_CHECKING:
    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats import Sampling, Unit, WindowArgument

Recipe = Literal["imagenet", "imagenet-eval", "none"]
"""A recipe that has a name."""

_PANEL = "The dataset"

Source = Annotated[
    str,
    Argument(help="The dataset: a path or an fsspec URL; or a mixture file (.yaml, .yml, .json)."),
]
Json = Annotated[bool, Option("--json", help="Print one JSON object on stdout.")]
StorageOption = Annotated[
    list[str] | None,
    Option(
        "--storage-option",
        "-o",
        help="KEY=VALUE for the file system (fsspec), repeatable.",
        rich_help_panel=_PANEL,
    ),
]
Workers = Annotated[int, Option(min=0, help="Decode threads; 0: one per usable core.")]
On = Annotated[
    str | None,
    Option(
        help="Run one task per shard on other workers: dask://HOST:PORT, "
        "dask-scheduler-file:FILE, ray://HOST:PORT, ray (the local one) or mpi "
        "(docs/howto/packs.md). "
        "All workers must reach the source and the destination."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """The options that describe a dataset, the same in all commands.

    format: Format of the data, if the names of its files don't show it: folder, tar, pack, zarr,
        npy (and .npz), parquet, arrow (and Feather), tokens, coco, voc, yolo.
    fields: Fields to use, such as image,label (default: all), or the source of each, as a
        sub-folder, pattern, column, member or path of an array: image=images,mask=masks.
    schema: Types of fields that aren't recognised, as JSON or a file with it: {"boxes": {"kind":
        "boxes", "of": "image", "format": "xywh"}}.
    manifest: Table of a folder's samples, such as list.csv or list.jsonl with a column path, or
        annotations in COCO's JSON; in the folder, next to it or elsewhere on this machine.
    sample: Size of a sample of arrays or tokens, by axis; - is a whole axis: 2048, 8,-,256,256, or
        image=8,-,256,256 for one array (repeatable); file: one file is a sample; row: one step of
        the first axis is a sample.
    stride: Distance between samples, written as --sample; by default their size.
    dtype: Number type of raw files, such as uint16 for tokens.
    documents: How sequences treat documents: across, within or pack.
    vocabulary: Number of token ids; a sample with an id that isn't below it is bad.
    allow_empty: Keep the class number of a class folder without samples, which is otherwise an
        error.
    max_pixels: Largest accepted image or mask, in pixels; by default 134,217,728.
    split: Part of a dataset whose files name its parts (VOC, YOLO); by default train.
    cache: Cache folder for a remote URL.
    """

    panel: ClassVar[str] = _PANEL
    format: str = "auto"
    fields: str | None = None
    schema: str | None = None
    manifest: str | None = None
    sample: list[str] | None = None
    stride: list[str] | None = None
    dtype: str | None = None
    documents: str | None = None
    vocabulary: int | None = None
    allow_empty: Annotated[bool, Option("--allow-empty")] = False
    max_pixels: Annotated[int | None, Option(min=1)] = None
    split: str | None = None
    cache: Path | None = None
    storage_option: StorageOption = None

    def sampling(self) -> Sampling:
        """Parse the options that cut arrays and tokens into samples. Raises ConfigError."""
        from penstock.readers.formats import check_sampling

        return check_sampling(
            sample=_windows("--sample", self.sample),
            stride=_windows("--stride", self.stride),
            dtype=self.dtype,
            documents=self.documents,
            vocabulary=self.vocabulary,
        )

    def description(self) -> dict[str, Any]:
        """Return the arguments of `readers.pack` and `open_index`. Raises ConfigError."""
        as_given = ("format", "manifest", "allow_empty", "max_pixels", "split", "cache")
        return {
            **{name: getattr(self, name) for name in as_given},
            "fields": parse_fields(self.fields),
            "schema": parse_schema(self.schema),
            "sampling": self.sampling(),
            "storage_options": parse_storage_options(self.storage_option),
        }

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `Dataset`. Raises ConfigError."""
        arguments = self.description()
        sampling: Sampling = arguments.pop("sampling")
        return arguments | sampling.arguments()

    def arguments_for(self, url: str) -> dict[str, Any]:
        """Return the arguments of `open_source` for a URL or a mixture file. Raises ConfigError for
        options that a mixture file has to contain."""
        from penstock.readers import is_mixture_file

        if not is_mixture_file(url):
            return self.arguments()
        given = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        if wrong := ", ".join(option_of(name) for name in given if name != "cache"):
            raise ConfigError(
                f"{wrong}: {url} is a mixture file, which contains this for each of its parts. "
                "Write it there."
            )
        return {"cache": self.cache}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedOptions(DatasetOptions):
    """The options that describe a dataset with an index, for commands that don't build one.

    index_folder: Folder that `penstock index --out` wrote.
    """

    index_folder: Annotated[str | None, Option("--index")] = None

    def description(self) -> dict[str, Any]:
        """Return the arguments of `open_index`. Raises ConfigError."""
        # A dataclass with slots is another class than the one that super() without arguments finds.
        return super(IndexedOptions, self).description() | {"index": self.index_folder}


def option_of(field: str) -> str:
    """Return the option of a field, as people write it."""
    return f"--{field.removesuffix('_folder').replace('_', '-')}"


def parse_names(text: str | None) -> tuple[str, ...] | None:
    """Parse comma-separated names of fields; None stays None."""
    return None if text is None else tuple(name.strip() for name in text.split(","))


def parse_fields(text: str | None) -> tuple[str, ...] | dict[str, str] | None:
    """Parse the names of fields, or their sources."""
    return parse_places(text) if text is not None and "=" in text else parse_names(text)


def parse_places(text: str | None) -> dict[str, str] | None:
    """Parse `image=images,mask=masks` into a dict. Raises ConfigError."""
    if text is None:
        return None
    pairs = [pair.partition("=") for pair in text.split(",")]
    places = {field: place for field, _, place in pairs if field}
    if not all(places.values()) or len(places) < len(pairs):
        raise ConfigError(
            f"--fields: got {text!r}, wanted the source of each field, once, such as "
            "image=images,mask=masks. Leave it out for the fields that are found without it."
        )
    return places


def parse_schema(text: str | None) -> dict[str, FieldType] | None:
    """Parse the types of fields, as JSON or a file with JSON. Raises ConfigError."""
    if text is None:
        return None
    from penstock.readers.fieldtypes import from_json

    try:
        written = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
        return {name: from_json(value) for name, value in written.items()}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"--schema: got {text[:200]!r} ({error}), wanted a JSON object, or a file with one, "
            "that has the type of each field (docs/reference/fields.md): "
            '{"label": {"kind": "class_label"}}.'
        ) from None


def _windows(option: str, values: list[str] | None) -> WindowArgument | None:
    """Parse `8,-,256` for all arrays, `image=8,-,256` for one array each, or `file` or `row`."""
    if option == "--sample" and values in (["file"], ["row"]):
        return cast("Unit", values[0])
    named: dict[str, tuple[int | None, ...]] = {}
    for text in values or ():
        name, equals, lengths = text.rpartition("=")
        if (not equals and len(values or ()) > 1) or name in named or (equals and not name):
            raise ConfigError(
                f"{option}: got {values!r}, wanted lengths once, such as 8,-,256,256, or once for "
                "each array: image=8,-,256,256."
            )
        named[name] = tuple(_length(option, each) for each in lengths.split(","))
    return named.get("", named or None)


def _length(option: str, text: str) -> int | None:
    if text.strip() == "-":
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"{option}: got {text!r}, wanted a whole number, or - for a whole axis"
            f"{'; or file, or row' if option == '--sample' else ''}."
        ) from None


def parse_storage_options(pairs: list[str] | None) -> dict[str, Any] | None:
    """Parse `KEY=VALUE` pairs into a dict; values that are JSON (true, 3, {...}) are decoded."""
    if not pairs:
        return None
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ConfigError(f"--storage-option: got {key!r}, wanted KEY=VALUE such as anon=true.")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options
