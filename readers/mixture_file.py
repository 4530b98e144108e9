"""Open the mixture that a YAML or JSON file describes: parts, weights and the rule of an epoch.

    parts:
      web: {url: "s3://bucket/web/*.parquet", fields: [tokens]}
      code: code-pack  # a URL alone; relative paths begin at the folder of the file
      math: math.yaml  # another mixture
    weights: {web: 0.7, code: 0.2, math: 0.1}
    max_repeats: {code: 4}

The keys of a part are arguments of `Dataset`, and the others are those of `mix`, all as plain
values. The file is data: nothing in it is executed or unpickled, and a key that isn't known is an
error, as is one that occurs twice.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.cache import ConfigError, DatasetNotFoundError, PenstockError
from penstock.readers.dataset import ALLOWED_LEFT_OUT, Dataset
from penstock.readers.fieldtypes import strict_json
from penstock.readers.files import parse_yaml
from penstock.readers.mixture import Mixture, mix
from penstock.readers.origin import Url, local_path, show

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.cache.disk import DiskCache
    from penstock.readers.index import Folder
    from penstock.readers.sources import Source

SUFFIXES = (".yaml", ".yml", ".json")
"""The ends of names that commands take for mixture files."""

_MOST_BYTES = 2**24
_OF_IMAGES, _OF_PARTS = re.compile(rb"^names[ \t]*:", re.M), re.compile(rb"^parts[ \t]*:", re.M)


def is_mixture_file(url: Url) -> bool:
    """Return True for the name of a mixture file, in contrast to the URL of a dataset, which may be
    YOLO's data.yaml."""
    if isinstance(url, list | tuple) or not os.fsdecode(url).lower().endswith(SUFFIXES):
        return False
    path = local_path(url)
    if path is None:
        return os.fsdecode(url).lower().endswith(".json")
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES)
    except OSError:
        return not os.path.isdir(path)
    return not _OF_IMAGES.search(data) or bool(_OF_PARTS.search(data))


def mix_file(
    path: str | os.PathLike[str],
    *,
    cache: DiskCache | Folder | None = None,
    allow_left_out: float = ALLOWED_LEFT_OUT,
) -> Mixture:
    """Mix the datasets that a YAML or JSON file lists: the same file that the commands warm, plan,
    inspect and bench take in place of a URL.

    The file has the keys `parts` (by name, the URL of a dataset or of another mixture file, or a
    mapping of the arguments of `Dataset`) and those of `mix`: weights, epoch, max_repeats,
    temperature, transition, per, fields, missing. Relative paths begin at the folder of the file.

    path: of a file on this machine. cache: of all parts that are remote. allow_left_out: of parts
    that set none. The mixture has opened its parts: its `close()` closes them. Raises ConfigError
    for a file that isn't valid, naming the place; the errors of `mix`, and those of opening the
    parts, with the names of file and part; MissingDependencyError for YAML without PyYAML.
    """
    return _MixtureFiles(cache=cache, allow_left_out=allow_left_out).mixture(os.fspath(path))


def open_source(
    url: Url, *, allow_left_out: float = ALLOWED_LEFT_OUT, **arguments: Any
) -> Dataset | Mixture:
    """Return the mixture of a mixture file, or the dataset of any other URL. arguments: of
    `Dataset`; for a mixture file only cache."""
    if is_mixture_file(url):
        assert not isinstance(url, list | tuple)
        return mix_file(os.fsdecode(url), allow_left_out=allow_left_out, **arguments)
    return Dataset(url, allow_left_out=allow_left_out, **arguments)


@dataclass(frozen=True, slots=True)
class _Kind:
    """The values that a key may have. inner: those in its lists and mappings; None for any."""

    words: str
    types: tuple[type, ...]
    inner: tuple[type, ...] | None = None

    def holds(self, value: object) -> bool:
        """Return True for a value of this kind."""
        if type(value) not in self.types:  # a bool is no number here
            return False
        found: list[object] = []
        if isinstance(value, list | dict):
            found = list(value.values() if isinstance(value, dict) else value)
        return self.inner is None or all(type(each) in self.inner for each in found)


_TEXT, _WHOLE = _Kind("a text", (str,)), _Kind("a whole number", (int,))
_NUMBER, _FLAG = _Kind("a number", (int, float)), _Kind("true or false", (bool,))
_NAMES = _Kind("a list of names", (list,), (str,))
_LENGTHS = "a number, a list of numbers, or either of them by field"
_WINDOW = _Kind(_LENGTHS, (int, str, list, dict))
_ANY_MAPPING = _Kind("a mapping", (dict,))

PART_KEYS: Mapping[str, _Kind] = {
    "url": _Kind("a URL, or a list of URLs within one store", (str, list), (str,)),
    "fields": _Kind("a list of names, or the place of each field", (list, dict), (str, type(None))),
    "format": _TEXT,
    "index": _TEXT,
    "storage_options": _ANY_MAPPING,
    "manifest": _Kind("a path, or false", (str, bool)),
    "schema": _Kind("the type of each field (docs/reference/fields.md)", (dict,), (dict,)),
    "sample": _WINDOW,
    "stride": _WINDOW,
    "dtype": _TEXT,
    "documents": _TEXT,
    "vocabulary": _WHOLE,
    "decoded_bytes": _Kind("a size, such as 4GB", (int, str)),
    "allow_left_out": _Kind("a share from 0 to 1", (int, float)),
    "allow_empty": _FLAG,
    "max_pixels": _WHOLE,
    "split": _TEXT,
}
"""The arguments of `Dataset` that a file may set: all but those that belong to a machine or are
objects."""

MIX_KEYS: Mapping[str, _Kind] = {
    "weights": _Kind(
        'a number for each part by its name, "size", or either of them by first sample',
        (str, dict),
        (int, float, str, dict),
    ),
    "epoch": _Kind('"first", "all", "once" or a number of samples', (str, int)),
    "max_repeats": _Kind("a number for some parts by their names", (dict,), (int, float)),
    "temperature": _NUMBER,
    "transition": _TEXT,
    "per": _TEXT,
    "fields": _NAMES,
    "missing": _TEXT,
}
"""The arguments of `mix` that a file may set."""

_PARTS = _Kind("the parts by name, each a URL or a mapping with the key url", (dict,), (str, dict))


@dataclass(kw_only=True, slots=True)
class _MixtureFiles:
    """Opens a mixture file, and those that it names. files: those that are being opened."""

    cache: DiskCache | Folder | None
    allow_left_out: float
    files: list[str] = field(default_factory=list)

    def mixture(self, path: str) -> Mixture:
        """Return the mixture of a file; see `mix_file`."""
        arguments = _checked(_read(path), {"parts": _PARTS, **MIX_KEYS}, file=path, place="")
        parts = arguments.pop("parts", None)
        if not parts:
            _refuse(path, "", "got no parts, wanted the key parts: datasets by name.")
        if "weights" in arguments:
            arguments["weights"] = _schedule(arguments["weights"], file=path)
        if "fields" in arguments:
            arguments["fields"] = tuple(arguments["fields"])
        self.files.append(os.path.realpath(path))
        with ExitStack() as opened:
            open = opened.enter_context
            sources = {name: open(self._part(name, part, path)) for name, part in parts.items()}
            with _naming(path):
                found = mix(sources, **arguments)
                found.fields  # noqa: B018  # raises for unknown ones
            opened.pop_all()
        self.files.pop()
        found.owns_parts = True
        return found

    def _part(self, name: str, part: str | dict[str, Any], file: str) -> Source:
        """Return a part, which is open."""
        place = f"parts.{name}"
        given = {"url": part} if isinstance(part, str) else part
        arguments = _checked(given, PART_KEYS, file=file, place=place)
        if "url" not in arguments:
            _refuse(file, place, "got no url, wanted the URL of a dataset.")
        folder = os.path.dirname(os.path.abspath(file))
        url = _absolute(arguments.pop("url"), folder)
        if is_mixture_file(url):
            return self._inner(url, arguments, file=file, place=place)
        if "index" in arguments:
            arguments["index"] = _absolute(arguments["index"], folder)
        if isinstance(arguments.get("manifest"), str):
            there = _absolute(arguments["manifest"], folder)
            if os.path.isfile(there):  # else it lies below the URL
                arguments["manifest"] = there
        if "schema" in arguments:
            arguments["schema"] = _types(arguments["schema"], file=file, place=f"{place}.schema")
        for key in ("sample", "stride"):
            if key in arguments:
                arguments[key] = _tuples(arguments[key])
        arguments.setdefault("allow_left_out", self.allow_left_out)
        with _naming(file, place):
            dataset = Dataset(url, cache=self.cache, **arguments)
            try:
                dataset.open()
            except BaseException:
                dataset.close()
                raise
        return dataset

    def _inner(self, url: str, others: dict[str, Any], *, file: str, place: str) -> Source:
        """Return a part that is the mixture of another file."""
        if others:
            what = f"{show(url)} is a mixture file, which has its own keys"
            _refuse(file, place, f"{what}: leave out {', '.join(others)}.")
        if (real := os.path.realpath(url)) in self.files:
            circle = [*self.files[self.files.index(real) :], real]
            names = " -> ".join(map(os.path.basename, circle))
            _refuse(file, place, f"the mixture files form a cycle: {names}. Leave one of them out.")
        with _naming(file, place):
            return self.mixture(url)


def _refuse(file: str, place: str, words: str) -> NoReturn:
    """Raise ConfigError for a place in a file."""
    raise ConfigError(f"{show(file)}: {f'{place}: ' if place else ''}{words}")


@contextmanager
def _naming(file: str, place: str = "") -> Iterator[None]:
    """Add the file and the place in it to the message of an error."""
    try:
        yield
    except PenstockError as error:
        first, *others = error.args or ("",)
        error.args = (f"{show(file)}: {f'{place}: ' if place else ''}{first}", *others)
        raise


def _checked(values: object, keys: Mapping[str, _Kind], *, file: str, place: str) -> dict[str, Any]:
    """Return a mapping whose keys are known and whose values have the types of these."""
    if not isinstance(values, dict):
        _refuse(file, place, f"got {_shown(values)}, wanted a mapping with some of {_names(keys)}.")
    for key, value in values.items():
        inner = f"{place}.{key}" if place else str(key)
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            _refuse(file, inner, f"the key isn't known.{hint} Wanted some of {_names(keys)}.")
        if not keys[key].holds(value):
            _refuse(file, inner, f"got {_shown(value)}, wanted {keys[key].words}.")
    return {str(key): value for key, value in values.items()}


def _names(keys: Mapping[str, _Kind]) -> str:
    return ", ".join(keys)


def _shown(value: object) -> str:
    """Return the start of a value's JSON."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _schedule(weights: Any, *, file: str) -> Any:
    """Return weights whose first samples are numbers: the keys of JSON are texts."""
    if not isinstance(weights, dict):
        return weights
    is_schedule = [isinstance(value, str | dict) for value in weights.values()]
    if not any(is_schedule):
        return weights
    found: dict[int, Any] = {}
    for (key, value), fits in zip(weights.items(), is_schedule, strict=True):
        text = str(key).replace("_", "")
        if not fits or not text.isdecimal():
            _refuse(
                file,
                f"weights.{key}",
                f"got {_shown(value)}, wanted either a number for each part by its name, or a "
                "schedule: weights by the sample of the job from which they hold, such as "
                '{0: {...}, 50_000_000: {...}}. Weights that are texts, such as "0.5", are no '
                "numbers.",
            )
        found[int(text)] = value
    return found


def _types(schema: dict[str, Any], *, file: str, place: str) -> dict[str, Any]:
    """Return the types of fields."""
    from penstock.readers.fieldtypes import from_json

    found = {}
    for name, value in schema.items():
        with _naming(file, f"{place}.{name}"):
            try:
                found[name] = from_json(value)
            except ValueError as error:
                raise ConfigError(f'{error}. Wanted such as {{"kind": "class_label"}}.') from None
    return found


def _tuples(value: Any) -> Any:
    """Return lists as tuples, also in a mapping."""
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _absolute(url: Any, folder: str) -> Any:
    """Return a URL, or a list of them, with relative paths made absolute."""
    if isinstance(url, list):
        return [_absolute(each, folder) for each in url]
    if (path := local_path(url)) is None or os.path.isabs(path):
        return url
    return os.path.join(folder, os.fsdecode(path))


# -- reading


def _read(path: str) -> Any:
    """Return the values of a YAML or JSON file."""
    if local_path(path) is None:
        _refuse(path, "", "got a remote file, wanted one on this machine. Copy it here first.")
    path = os.fsdecode(local_path(path) or b"")
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise DatasetNotFoundError(
            f"{path}: this mixture file doesn't exist. Names that end in {', '.join(SUFFIXES)} are "
            "those of mixture files."
        ) from None
    except OSError as error:
        _refuse(path, "", f"the mixture file can't be read ({error.strerror}).")
    if len(data) > _MOST_BYTES:
        _refuse(path, "", f"the file has more than {_MOST_BYTES:,} bytes. Wanted a list of parts.")
    try:
        text = data.decode()
        if path.lower().endswith(".json"):
            return strict_json(text)
        return parse_yaml(text, what="A mixture file", instead=" Or write the file as JSON.")
    except (ValueError, RecursionError) as error:
        words = " ".join(str(error).split())
        _refuse(path, "", f"got a file that can't be parsed ({words}), wanted YAML or JSON.")
