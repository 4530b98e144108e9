"""Look up formats by name: our own, in the order in which `format="auto"` asks them, and others'.

A format is a module that ends with its `FORMAT`; `record_format.RecordFormat` is the base of simple
ones, `format.Format` says what any has. One of ours is named in `_MODULES` below. Another package
names its own in its pyproject.toml:

    [project.entry-points."penstock.formats"]
    cifar = "my_package.cifar"

Both run the tests of tests/readers/formats/conformance.py.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache import ConfigError, MissingDependencyError
from penstock.readers.files import extension

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.metadata import EntryPoint

    from penstock.readers.formats.format import Format, Indexing
    from penstock.readers.origin import Origin

AUTO = "auto"
"""Whichever format recognises the dataset first."""

FALLBACK = "folder"
"""The format that takes whatever no other does."""

ARRAYS = "npy"
"""The format of files of which one may be a sample."""

GROUP = "penstock.formats"
"""The entry points of formats that other packages bring."""


class _OwnFormat(NamedTuple):
    """A format of ours. marks: names of files, and extensions, one of which lies at the root of any
    such dataset; none: it is asked whatever lies there."""

    module: str
    marks: frozenset[str] = frozenset()


def _marked(module: str, *marks: str) -> _OwnFormat:
    return _OwnFormat(module, frozenset(marks))


# A module's FORMAT is loaded when it is first asked for: who reads a pack needs no tar files, and
# a folder of images nothing of tables.
_MODULES = {
    # These say by a file of their own what they are.
    "pack": _OwnFormat("penstock.readers.formats.pack.pack_format"),
    # Groups of arrays do so too.
    "zarr": _marked(
        "penstock.readers.formats.zarr.zarr_format", "zarr.json", ".zgroup", ".zarray", ".zmetadata"
    ),
    # What is a set of files is told by their names, then by their first bytes. Archives:
    "tar": _OwnFormat("penstock.readers.formats.tar.tar_format"),
    # tables, whose files say what they are in their last bytes;
    "parquet": _marked("penstock.readers.formats.parquet.parquet_format", "parquet", "parq", "pq"),
    # those that Arrow writes as it has them in memory;
    "arrow": _marked(
        "penstock.readers.formats.arrow.arrow_format", "arrow", "arrows", "feather", "ipc"
    ),
    # streams of tokens, by the files that tell where documents begin;
    "tokens": _marked("penstock.readers.formats.tokens.token_format", "bin", "idx"),
    # arrays.
    ARRAYS: _marked("penstock.readers.formats.npy.npy_format", "npy", "npz"),
    # Whatever is left:
    FALLBACK: _OwnFormat("penstock.readers.formats.folder.folder_format"),
}
_METHODS = ("recognises", "opener", "blob_key")
_FACTS = ("name", "least_sample_bytes", "is_file_per_sample", "indexing")


@cache
def _entry_points() -> dict[str, EntryPoint]:
    """The formats of other packages by name, none loaded; ours can't be replaced."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _MODULES}


def format_names() -> tuple[str, ...]:
    """The names that `format=` takes."""
    return (AUTO, *_MODULES, *_entry_points())


def is_format(name: str) -> bool:
    """Whether a format has this name, as a manifest notes it."""
    return name in _MODULES or name in _entry_points()


@cache
def format_named(name: str) -> Format:
    """The format of a name that was checked: a manifest's, or an argument. Raises
    MissingDependencyError, ConfigError (another package's doesn't load, or isn't a format)."""
    if name not in _MODULES:
        return _load_external(_entry_points()[name])
    found: Format = import_module(_MODULES[name].module).FORMAT
    return found


def _load_external(point: EntryPoint) -> Format:
    package = point.dist.name if point.dist is not None else point.value
    where = f"format {point.name!r} of the package {package} ({point.value})"
    try:
        loaded = point.load()
    except ImportError as error:
        raise MissingDependencyError(
            f"{where}: can't be imported ({error}). Install what it needs, or uninstall it."
        ) from error
    except Exception as error:  # another's code: whatever it raises is told with its name
        raise ConfigError(
            f"{where}: fails when it is imported ({type(error).__name__}: {error}). Tell its "
            "authors, or uninstall it."
        ) from error
    found: Format = getattr(loaded, "FORMAT", loaded)
    lacks = [name for name in _METHODS if not callable(getattr(found, name, None))]
    lacks += [name for name in _FACTS if not hasattr(found, name)]
    if lacks or found.name != point.name:
        why = f"lacks {', '.join(lacks)}" if lacks else f"calls itself {found.name!r}"
        raise ConfigError(
            f"{where}: isn't a format: it {why}. See penstock.readers.formats.format.Format."
        )
    return found


def format_of_manifests() -> Format:
    """The format of files that a user's own table lists."""
    return format_named(FALLBACK)


def formats(origin: Origin | None = None) -> Iterator[Format]:
    """Our formats, in the order in which they are asked: those that a dataset may be of by what
    lies at its root, and no other is loaded; None: all."""
    shown: set[str] | None = None
    for name, ours in _MODULES.items():
        if ours.marks and origin is not None:
            if shown is None:
                names = [each.rpartition(b"/")[2] for each in origin.names().files]
                shown = {extension(each) for each in names}
                shown.update(each.decode("utf-8", "replace") for each in names)
            if not ours.marks & shown:
                continue
        yield format_named(name)


def is_recognised_by_names(format: Format) -> bool:
    """Whether names at the root say that a dataset may be of a format; others are asked before."""
    return format.name in _MODULES and bool(_MODULES[format.name].marks)


def self_indexed() -> Iterator[Format]:
    """Our formats whose datasets carry their index."""
    unmarked = (format_named(name) for name, ours in _MODULES.items() if not ours.marks)
    return (format for format in unmarked if format.indexing is None)


def external_formats() -> Iterator[Format]:
    """The formats of other packages. Raises as `format_named` does."""
    return map(format_named, _entry_points())


def has_external_formats() -> bool:
    """Whether other packages bring formats; loads none."""
    return bool(_entry_points())


def looks_like_fallback(origin: Origin) -> bool:
    """Whether a dataset's root shows that it is of the format that takes whatever no other does: it
    has folders or images."""
    from penstock.readers.formats.folder import IMAGES

    top = origin.top(lambda name: extension(name) in IMAGES)
    return bool(top.folders or top.entries)


def check_format(format: str) -> None:
    """Raise ConfigError for a name that `format=` doesn't take."""
    if format not in _MODULES and format not in format_names():
        raise ConfigError(f"format: got {format!r}, wanted one of {list(format_names())}.")


def indexing_of(format: Format) -> Indexing:
    """How a dataset of a format that doesn't carry its index gets one."""
    if format.indexing is None:
        raise TypeError(f"{format.name}: such a dataset carries its index")
    return format.indexing
