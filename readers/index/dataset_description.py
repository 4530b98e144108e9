"""Hold the arguments that identify a dataset, and send them to workers on other machines.

Credentials are never sent: the owner of a worker's machine gives it a login of its own, as for any
other client of a store.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from penstock.cache import ConfigError, DatasetNotFoundError, find_secrets, plain_query
from penstock.readers.fieldtypes import FieldTypes, check_field_name, check_field_type
from penstock.readers.formats import AUTO, check_format
from penstock.readers.origin import (
    DEFAULT_ARRANGEMENT,
    NO_TABLE,
    Arrangement,
    Scratch,
    check_url,
    local_path,
    locate,
    show,
    status_of,
)

if TYPE_CHECKING:
    from penstock.cache.disk import DiskCache
    from penstock.readers.formats import ManifestFile, Sampling
    from penstock.readers.origin import Origin, Url
    from penstock.readers.types import Progress, Verify

_LOGIN = (
    "Credentials aren't sent to workers, because their scheduler and logs would contain them. "
    "Leave them out, and give each machine a login of its own: the environment (AWS_ACCESS_KEY_ID, "
    "GOOGLE_APPLICATION_CREDENTIALS, AZURE_…), a profile, or the instance's role."
)

_TABLE_ENDS, _TABLES_NAMED = (".json", ".jsonl", ".csv", ".tsv", ".parquet"), 5
_YAML = (".yaml", ".yml")  # such as YOLO's data.yaml

Folder = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The options for building an index. verify: decodes images; None means the installed decoder.
    workers: threads. check_by_workers: checks the samples by an executor; see
    `check_by_executor`."""

    verify: Verify | str | None = None
    workers: int = 1
    progress: Progress | None = None
    check_by_workers: Callable[..., Iterator[Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetDescription:
    """The arguments that identify a dataset; `Dataset` documents them. Raises ConfigError for
    invalid ones.

    fields: the place of each field; None if none is given. sampling: None is the default.
    """

    url: Url
    format: str = AUTO
    index: Folder | None = None
    cache: DiskCache | Folder | None = None
    storage_options: Mapping[str, Any] | None = None
    filesystem: Any | None = None
    manifest: ManifestFile | None = None
    fields: Mapping[str, str | None] | None = None
    schema: FieldTypes | None = None
    sampling: Sampling | None = None
    allow_empty: bool = False
    max_pixels: int | None = None
    split: str | None = None

    def __post_init__(self) -> None:
        check_url(self.url)
        check_format(self.format)
        if isinstance(self.url, list):  # the caller may change its list later
            object.__setattr__(self, "url", tuple(self.url))
        url = self.url if isinstance(self.url, str | bytes | os.PathLike) else ""
        if self.manifest is None and os.fsdecode(url).lower().endswith(_YAML):
            from penstock.readers.origin import described_folder  # other data doesn't load it

            described = described_folder(url, is_path=self.filesystem is not None)
            if described is not None:
                object.__setattr__(self, "url", described[0])
                object.__setattr__(self, "manifest", described[1])
        if self.manifest is None:
            self.arrangement()
        else:  # its place is checked when the dataset is opened
            replace(self, manifest=None)

    def arrangement(self) -> Arrangement:
        """Return how the files make up samples. Raises ConfigError."""
        types: Any = {} if self.schema is None else self.schema
        most = self.max_pixels
        if type(self.allow_empty) is not bool:
            raise ConfigError(f"allow_empty: got {self.allow_empty!r}, wanted True or False.")
        if most is not None and (type(most) is not int or most < 1):
            raise ConfigError(
                f"max_pixels: got {most!r}, wanted the pixels of the largest image: 200_000_000."
            )
        if self.split is not None and (type(self.split) is not str or not self.split):
            raise ConfigError(
                f'split: got {self.split!r}, wanted the name of a part of the data, such as "val".'
            )
        if not isinstance(types, Mapping):
            raise ConfigError(
                f'schema: got {types!r}, wanted types by field, such as {{"boxes": '
                'Boxes(of="image")}.'
            )
        for name, type_ in types.items():
            check_field_name(name, what="schema")
            check_field_type(name, type_)
        is_default = self.sampling is None or not self.sampling.to_json()
        return Arrangement(
            manifest=_manifest(self.url, self.manifest, is_path=self.filesystem is not None),
            places=_places(self.fields or {}),
            schema=dict(types),
            sampling=None if is_default else self.sampling,
            allow_empty=self.allow_empty,
            max_pixels=most,
            split=self.split,
        )

    def locate(self, scratch: Scratch, arrangement: Arrangement) -> Origin:
        """Open the dataset's files. Raises the same errors as `origin.locate`."""
        return locate(
            self.url,
            storage_options=self.storage_options,
            scratch=scratch,
            filesystem=self.filesystem,
            arrangement=arrangement,
        )

    def for_workers(self) -> DatasetDescription:
        """Return the description for other machines: with absolute paths, and without secrets.
        Raises ConfigError for arguments that can't be sent."""
        if self.filesystem is not None:
            raise ConfigError(
                "filesystem: got a file system object together with executor=, but it can't be "
                "sent to workers. Name the data by a URL that fsspec opens, with storage_options=."
            )
        for url in self.url if isinstance(self.url, tuple) else (self.url,):
            if isinstance(url, str) and "://" in url and _has_login(url):
                raise ConfigError(f"url: {show(url)} contained a login or a signature. {_LOGIN}")
        options = dict(self.storage_options or {})
        if secrets := [name for name, value in options.items() if find_secrets({name: value})]:
            raise ConfigError(
                f"storage_options: got {', '.join(secrets)} together with executor=. {_LOGIN}"
            )
        cache = self.cache
        if isinstance(cache, str | os.PathLike):
            cache = os.path.abspath(os.fspath(cache))
        return replace(self, url=_absolute(self.url), cache=cache)

    def open_files(self) -> tuple[Origin, Scratch]:
        """Open the files in a worker, once per process. Raises DatasetNotFoundError if this machine
        doesn't have their folder, and the same errors as `locate`."""
        from penstock.cache import keep_open

        return keep_open(self, self._open_files)

    def _open_files(self) -> tuple[Origin, Scratch]:
        scratch = Scratch(self.cache)
        origin = self.locate(scratch, DEFAULT_ARRANGEMENT)
        if origin.is_local and origin.folder and status_of(origin.folder) is None:
            raise DatasetNotFoundError(
                f"{origin.url} doesn't exist on this machine, although it exists on the machine of "
                "the driver. Mount it under the same path on every machine that runs workers, or "
                "name the data by the URL of a store."
            )
        return origin, scratch


def _absolute(url: Any) -> Any:
    if isinstance(url, tuple):
        return tuple(map(_absolute, url))
    path = local_path(url)
    if path is None:
        return url
    absolute = os.path.abspath(path)
    # A trailing slash marks a folder.
    return os.fsdecode(absolute + b"/" if path.endswith(b"/") else absolute)


def _places(fields: Mapping[str, str | None]) -> tuple[tuple[str, str], ...]:
    """Return the place of each field that has one."""
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
    """Return the place of the table of samples, as `Arrangement.manifest` has it."""
    if manifest is None:
        return None
    if manifest is False:
        return NO_TABLE
    given = os.fspath(manifest) if isinstance(manifest, str | os.PathLike) else None
    if not isinstance(given, str) or not given or "\0" in given:
        raise ConfigError(
            f"manifest: got {manifest!r}, wanted a table such as list.csv or list.jsonl, or False."
        )
    if isinstance(url, list | tuple):
        raise ConfigError(
            f"manifest: a table lists the files of a folder, but the dataset is a list of "
            f"{len(url):,} files. Leave one out."
        )
    path, root = local_path(given), None if is_path else local_path(url)
    if path is None:
        shown = str(url).rstrip("/") + "/"
        above = shown[:-1].rpartition("/")[0] + "/"  # tables may lie next to the folder of files
        if not is_path and not given.startswith(shown) and given.startswith(above):
            return given[len(above) :]
        if is_path or not given.startswith(shown):
            raise ConfigError(
                f"manifest: got {show(given)}, wanted a name below {show(url)}, or a path on this "
                "machine: download the table first."
            )
        return given[len(shown) :]
    named = os.fsdecode(path)
    if root is None:
        is_local = not isinstance(manifest, str) or named.startswith(("/", "./", "../"))
        return os.path.abspath(named) if is_local else os.path.normpath(named)
    found = named
    if not os.path.isabs(named):
        folder = os.path.abspath(os.fsdecode(root))
        above = os.path.join(os.path.dirname(folder), named)
        places = [os.path.join(os.fsdecode(root), named), os.path.abspath(named)]
        existing = [each for each in places if status_of(each) is not None]
        if not existing and status_of(above) is not None:
            return named  # next to the root; relative, so that the data can be moved
        if not existing or (len(existing) == 2 and not os.path.samefile(*existing)):
            if existing:
                wrong = f"both {places[0]} and {places[1]} exist. Give an absolute path."
            else:
                listed = ", ".join(_tables({os.path.dirname(each) for each in (*places, above)}))
                wrong = f"neither {places[0]}, {above} nor {places[1]} exists. " + (
                    f"Tables there: {listed}." if listed else "Give an absolute path."
                )
            raise ConfigError(f"manifest: got {named!r}, but {wrong}")
        found = os.path.abspath(existing[0])
    # Relative to the root, so that the data can be moved.
    return found.removeprefix(os.path.abspath(os.fsdecode(root)).rstrip("/") + "/")


def _tables(folders: Iterable[str]) -> list[str]:
    """Return the paths of the first tables in some folders, for a message."""
    found: list[str] = []
    for folder in folders:
        with contextlib.suppress(OSError):
            found += (os.path.join(folder, name) for name in os.listdir(folder))
    return sorted(each for each in found if each.endswith(_TABLE_ENDS))[:_TABLES_NAMED]


def _has_login(url: str) -> bool:
    parts = urlsplit(url)
    if parts.password or (parts.username and parts.scheme not in ("abfs", "abfss")):
        return True
    return len(parse_qsl(parts.query, keep_blank_values=True)) > len(plain_query(url))
