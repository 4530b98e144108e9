"""Look up formats by name: ours, in the order in which `format="auto"` tries them, and other
packages'.

A format is a module that ends with its `FORMAT`. `record_format.RecordFormat` is the base of simple
formats, and `format.Format` is the protocol of all. `_MODULES` below names ours. Another package
names its own in its pyproject.toml:

    [project.entry-points."penstock.formats"]
    cifar = "my_package.cifar"

Both must pass the tests of tests/readers/formats/conformance.py.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cache import ConfigError, MissingDependencyError
from penstock.readers.files import extension, is_passed_over
from penstock.readers.formats.format import Format

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.readers.origin import Origin

AUTO = "auto"
"""Choose the first format that recognises the dataset."""

FALLBACK = "folder"
"""The format of datasets that no other format recognises."""

GROUP = "penstock.formats"
"""The entry points of formats that other packages provide."""

_NAME = re.compile(r"[A-Za-z][\w.-]{0,63}")


class _OwnFormat(NamedTuple):
    """One of our formats. module: in this package. marks: file names and extensions of which at
    least one lies at the root of any such dataset; if there are none, the format is always tried.
    manifests: extensions of files that list the samples, and are passed as `manifest=`."""

    module: str
    marks: tuple[str, ...] = ()
    manifests: tuple[str, ...] = ()


# A module is imported when its FORMAT is first used: a job that reads a pack doesn't load the code
# for tar files, and one that reads a folder of images doesn't load the code for tables.
_MODULES = {
    # A pack and a Zarr group contain a file that identifies them.
    "pack": _OwnFormat("pack.pack_format"),
    "zarr": _OwnFormat("zarr.zarr_format", ("zarr.json", ".zgroup", ".zarray", ".zmetadata")),
    # Sets of files are recognised by their names, then by their first bytes.
    "tar": _OwnFormat("tar.tar_format"),
    "parquet": _OwnFormat("parquet.parquet_format", ("parquet", "parq", "pq")),
    "arrow": _OwnFormat("arrow.arrow_format", ("arrow", "arrows", "feather", "ipc")),
    "tokens": _OwnFormat("tokens.token_format", ("bin", "idx")),
    "npy": _OwnFormat("npy.npy_format", ("npy", "npz")),
    "jsonl": _OwnFormat("jsonl_format", ("jsonl",)),
    # Annotations of images.
    "coco": _OwnFormat("annotated.coco_format", ("_annotations.coco.json",), ("json",)),
    "voc": _OwnFormat(
        "annotated.voc_format", ("Annotations", *(f"VOC{year}" for year in range(2005, 2013)))
    ),
    "yolo": _OwnFormat("annotated.yolo_format", ("yaml", "yml", "classes.txt"), ("yaml", "yml")),
    # It accepts what no other format recognises.
    FALLBACK: _OwnFormat("folder.folder_format"),
}


@cache
def external_entry_points() -> dict[str, EntryPoint]:
    """Return the formats of other packages by name, not loaded. They can't replace ours."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _MODULES}


def format_names() -> tuple[str, ...]:
    """Return the names that `format=` accepts."""
    return (AUTO, *_MODULES, *external_entry_points())


def is_format(name: str) -> bool:
    """Return True if a format has this name, as recorded in a manifest; False for text that isn't a
    name. Raises MissingDependencyError for a format that no package provides."""
    if name in _MODULES or name in external_entry_points():
        return True
    if not _NAME.fullmatch(name):
        return False
    raise MissingDependencyError(
        f"It has the format {name!r}, which isn't one of Penstock's. Install the package that "
        f"provides it (entry point {name!r} of {GROUP!r})."
    )


@cache
def format_named(name: str) -> Format:
    """Return the format of a name that was checked before: a manifest's, or an argument.

    Raises MissingDependencyError if another package's format doesn't load, and ConfigError if it
    isn't a format.
    """
    if name not in _MODULES:
        return _load_external(external_entry_points()[name])
    found: Format = import_module(f"{__package__}.{_MODULES[name].module}").FORMAT
    return found


def _load_external(point: EntryPoint) -> Format:
    package = point.dist.name if point.dist is not None else point.value
    label = f"format {point.name!r} of the package {package} ({point.value})"
    try:
        loaded = point.load()
    except Exception as error:  # another package's code may raise anything
        raise MissingDependencyError(
            f"{label}: can't be imported ({type(error).__name__}: {error}). Install what it needs, "
            "or uninstall it."
        ) from error
    found: Any = getattr(loaded, "FORMAT", loaded)
    if isinstance(found, Format) and found.name == point.name:
        return found
    raise ConfigError(
        f"{label}: isn't a valid format. Expected an object of a subclass of "
        f"penstock.readers.formats.Format with this name, got {found!r:.80}."
    )


def format_of_manifest(manifest: str) -> Format:
    """Return the format of a dataset whose samples a file lists. manifest: the file's name."""
    ending = manifest.rpartition(".")[2].lower()
    named = (name for name, ours in _MODULES.items() if ending in ours.manifests)
    return format_named(next(named, FALLBACK))


def formats(origin: Origin | None = None) -> Iterator[Format]:
    """Yield our formats, in the order in which they are tried.

    origin: yield only formats that the names at the dataset's root allow, and load no others; None
    yields all.
    """
    shown: set[str] | None = None
    for name, ours in _MODULES.items():
        if ours.marks and origin is not None:
            if shown is None:
                found = origin.names()
                names = [each.rpartition(b"/")[2] for each in (*found.files, *found.folders)]
                shown = {extension(each) for each in names}
                shown.update(each.decode("utf-8", "replace") for each in names)
            if shown.isdisjoint(ours.marks):
                continue
        yield format_named(name)


def shows_own_index(origin: Origin) -> bool:
    """Return True if the dataset shows traces of a format that carries its index, complete or
    not."""
    unmarked = (format_named(name) for name, ours in _MODULES.items() if not ours.marks)
    return any(format.recognises(origin) for format in unmarked if format.has_own_index)


def recognised_format(origin: Origin) -> Format:
    """Return the format of a dataset that doesn't carry its index. Formats of other packages are
    loaded only if no built-in format recognises it for sure. Raises ConfigError if the names of the
    files suggest several formats, or none."""
    ours = [format for format in formats(origin) if not format.has_own_index]
    found: list[Format] = []
    for format in ours:
        if format.name == FALLBACK or not format.recognises(origin):
            continue
        if not _MODULES[format.name].marks:
            return format
        found.append(format)
    if len(found) > 1:
        choices = " or ".join(f'format="{format.name}"' for format in found)
        raise ConfigError(
            f"{origin.url}: this folder holds files of several kinds. Choose those of the "
            f"dataset by {choices} (--format), or name them, such as data/*.parquet."
        )
    if found:
        return found[0]
    fallback = next((f for f in ours if f.recognises(origin)), None)
    if external_entry_points() and (fallback is None or not _looks_like_fallback(origin)):
        external = map(format_named, external_entry_points())
        fallback = next((each for each in external if each.recognises(origin)), fallback)
    if fallback is None:
        raise _unknown(origin)
    return fallback


def _looks_like_fallback(origin: Origin) -> bool:
    """Return True if a dataset's root contains folders or images, as the fallback format
    expects."""
    from penstock.readers.files import IMAGES  # not needed if a format is found

    names = origin.names()
    has_images = any(extension(name) in IMAGES for name in names.files)
    return has_images or not all(map(is_passed_over, names.folders))


def _unknown(origin: Origin) -> ConfigError:
    """Return the error for files that no format recognises."""
    selection, url = origin.selection, origin.url
    if selection is not None and selection.is_one:
        from penstock.readers.origin import not_a_folder_message

        return ConfigError(not_a_folder_message(url))
    kinds = Counter(extension(name) or "no extension" for name in origin.names().files)
    shown = ", ".join(f"{count:,} .{kind}" for kind, count in kinds.most_common(4))
    return ConfigError(
        f"{url}: no format recognises these files ({shown or 'there are none'}). Name those of one "
        "kind, such as data/*.parquet, or pass their format as format=."
    )


def check_format(format: str) -> None:
    """Raise ConfigError for a name that `format=` doesn't accept."""
    if format not in _MODULES and format not in format_names():
        raise ConfigError(f"format: got {format!r}, wanted one of {list(format_names())}.")
