"""Open a dataset's index, or build it on first use.

The format is `format=`, or else what the index or the dataset's root shows. A pack has its manifest
in its own folder. The index of other data is looked for in `index=`, or else next to the data
(`photos.penstock`), in the cache folder and in the user's cache directory. A new index is built in
the first of these places that is writable. If the data has changed, the index is updated. A remote
dataset isn't listed again on opening (stores list a page at a time) if its index is next to it, in
the cache folder or in `index=`; `penstock index` updates that index. Nothing is written to a remote
store except by `penstock index --out`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import (
    ConfigError,
    CorruptShardError,
    DatasetNotFoundError,
    FetchError,
    PenstockWarning,
)
from penstock.readers.files import OWN_FOLDER, extension, printable
from penstock.readers.formats import (
    ARRAYS,
    AUTO,
    FALLBACK,
    check_format,
    external_formats,
    format_named,
    formats,
    has_external_formats,
    is_recognised_by_names,
    looks_like_fallback,
    self_indexed,
)
from penstock.readers.index.index import index_of
from penstock.readers.index.manifest_file import MANIFEST, read_manifest_of
from penstock.readers.origin import DEFAULT_ARRANGEMENT, LocalFolder, plain_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.formats import Format
    from penstock.readers.index.building import Checker
    from penstock.readers.index.index import Index
    from penstock.readers.index.index_folders import Folder, IndexPlaces, ManifestLookup
    from penstock.readers.index.maintenance import IndexMaintenance
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.origin import Arrangement, Origin, RemoteFolder, Scratch, Url
    from penstock.readers.types import Progress, Verify

OWN_MANIFEST = OWN_FOLDER + b"/" + MANIFEST
"""The name of a pack's manifest, relative to its root."""

REPACK = "Run `penstock pack SRC DST` again into an empty folder, or fetch the pack again."

_MANY_SAMPLES = 2**18


class FormatRecognition:
    """Recognise the format of one dataset. index: the folder that the user gave for its index."""

    def __init__(self, origin: Origin, *, scratch: Scratch, index: Folder | None) -> None:
        self._origin, self._scratch, self._index = origin, scratch, index

    @property
    def places(self) -> IndexPlaces:
        """The folders that may hold the index, which packs don't have."""
        from penstock.readers.index.index_folders import IndexPlaces

        return IndexPlaces(origin=self._origin, scratch=self._scratch, index=self._index)

    @cached_property
    def manifests(self) -> ManifestLookup:
        """The manifests that lie apart from the data."""
        from penstock.readers.index.index_folders import ManifestLookup

        return ManifestLookup(self._origin, self.places)

    @cached_property
    def own(self) -> Manifest | None:
        """Return the manifest in the dataset's own folder, as packs have. Raises FetchError,
        CorruptShardError if it is damaged, DatasetError if a newer version wrote it."""
        origin = self._origin
        if origin.selection is not None:
            return None
        try:
            found = origin.find(OWN_MANIFEST)
        except FetchError as error:
            if self.manifests.local is None:
                raise
            warnings.warn(
                f"{origin.url}: the remote can't be reached, so the cached index is used without a "
                f"check. {error}",
                PenstockWarning,
                stacklevel=6,
            )
            return None
        if found is None:
            return None
        try:
            manifest = read_manifest_of(origin, OWN_MANIFEST, *found, remedy=REPACK)
        except CorruptShardError:
            if self.is_begun:
                raise
            return None
        return manifest if manifest.format.indexing is None else None

    @property
    def is_begun(self) -> bool:
        """Return True if the dataset's own folder shows traces of a format that carries its index,
        complete or not."""
        return any(format.recognises(self._origin) for format in self_indexed())

    def own_index(self, format: str) -> Manifest | None:
        """Return the manifest of a dataset that carries its index (a pack), None for any other.
        Raises DatasetNotFoundError for an incomplete pack, and the same errors as `open_index`."""
        if format != AUTO and format_named(format).indexing is not None:
            return None
        own = self.own
        if own is not None:
            self._check_large(own)
            if self._index is not None:
                raise ConfigError(
                    f"{self._origin.url} is a pack and has its own index. Leave index= out."
                )
            return own
        if format != AUTO or (self.manifests.separate is None and self.is_begun):
            raise DatasetNotFoundError(
                f"{self._origin.url}: this pack isn't complete: its manifest "
                f"({OWN_MANIFEST.decode()}), which is written last, is missing. Run the same "
                "`penstock pack` again to resume it, or copy the pack again with its `_penstock` "
                "folder."
            )
        return None

    def indexed(self, format: str) -> Format:
        """Return the format of a dataset that doesn't carry its index. Raises ConfigError if the
        format is ambiguous or unknown, and FetchError."""
        found = self._indexed(format)
        from penstock.readers.formats import Sampling  # packs don't use it

        unit = Sampling.of(self._origin.arrangement).unit
        if unit == "file" and found.name != ARRAYS:
            raise ConfigError(
                f'sample: got "file", which is for files of arrays (.npy, .npz), but '
                f"{self._origin.url} is of the format {found.name}. Leave it out."
            )
        return found

    def _indexed(self, format: str) -> Format:
        if self._origin.arrangement.manifest is not None:
            return self._listed(format)
        if self._origin.selection is not None:
            return self._selected(format)
        if format != AUTO:
            return format_named(format)
        known = None if self._origin.is_local else self.manifests.separate
        return self._by_root() if known is None else known.format

    def _listed(self, format: str) -> Format:
        """Return the format of datasets whose samples a manifest lists."""
        found = format_named(FALLBACK)
        if format not in (AUTO, found.name) or self._origin.selection is not None:
            other = f'format="{format}"' if format != AUTO else "a URL that names files"
            raise ConfigError(
                f"manifest: a table lists the files of a folder, but {self._origin.url} is given "
                f'with {other}. Leave one out, or pass format="{found.name}".'
            )
        return found

    def _selected(self, format: str) -> Format:
        """Return the format of files that the URL names. `format=` counts, except for formats of
        folders."""
        if format not in (AUTO, FALLBACK) and format_named(format).indexing is not None:
            return format_named(format)
        found = self._by_root()
        if format not in (AUTO, found.name):
            raise ConfigError(
                f"format: got {format!r} for {self._origin.url}, which names {found.name} files. "
                "Leave format out."
            )
        return found

    def _by_root(self) -> Format:
        """Return the format that recognises the dataset. Formats of other packages are loaded only
        if no built-in format recognises it for sure. Raises ConfigError if the names of the files
        suggest several formats."""
        origin = self._origin
        ours = [format for format in formats(origin) if format.indexing is not None]
        found: list[Format] = []
        for format in ours:
            if format.name == FALLBACK or not format.recognises(origin):
                continue
            if not is_recognised_by_names(format):
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
        if has_external_formats() and (fallback is None or not looks_like_fallback(origin)):
            external = (each for each in external_formats() if each.recognises(origin))
            if (recognised := next(external, None)) is not None:
                return recognised
        if fallback is None:
            raise self._unknown()
        return fallback

    def _unknown(self) -> ConfigError:
        """Return the error for files that no format recognises."""
        selection, url = self._origin.selection, self._origin.url
        if selection is not None and selection.is_one:
            from penstock.readers.origin import not_a_folder_message

            return ConfigError(not_a_folder_message(url))
        kinds = Counter(extension(name) or "no extension" for name in self._origin.names().files)
        if len(kinds) < 2:
            return ConfigError(
                f"{url}: no format recognises this dataset. Pass its format as format=."
            )
        shown = ", ".join(f"{count:,} .{kind}" for kind, count in kinds.most_common(4))
        return ConfigError(
            f"{url}: names files of several kinds ({shown}), which no format reads together. Name "
            "those of one kind, such as data/*.parquet, or pass their format as format=."
        )

    def _check_large(self, own: Manifest) -> None:
        """Check that the files of very large shards exist, before anything is sized by the
        manifest."""
        if not isinstance(self._origin, LocalFolder):
            return
        for shard in np.flatnonzero(own.samples > _MANY_SAMPLES).tolist():
            name, size_bytes = own.names[shard], int(own.shard_bytes[shard])
            found = self._origin.find(name)
            if found is None or found[0] != size_bytes:
                raise CorruptShardError(
                    f"{self._origin.url}: {printable(name)} is missing or doesn't have the size in "
                    f"the manifest ({size_bytes:,} bytes). {REPACK}"
                )


def locate_fields(
    url: Url,
    *,
    storage_options: Mapping[str, Any] | None,
    scratch: Scratch,
    filesystem: Any | None,
    arrangement: Arrangement,
    index: Folder | None,
    format: str,
) -> tuple[Origin, dict[str, str]]:
    """Open the origin of a URL. Return it with the new names of fields, each mapped to its name in
    the index.

    A place in `fields=` is a folder, a pattern or a column that holds a field. If the data has no
    such place but fields of their own names, the place is such a name: these fields are renamed,
    and the index is that of the data without `fields=`. Raises the same errors as `locate` and
    `open_index`.
    """
    check_format(format)

    def located(arrangement: Arrangement) -> Origin:
        may_be_plain = filesystem is None and not scratch.is_kept  # else: a network file system?
        if may_be_plain and (folder := plain_folder(url, arrangement)) is not None:
            return folder
        from penstock.readers.origin import locate

        return locate(
            url,
            storage_options=storage_options,
            scratch=scratch,
            filesystem=filesystem,
            arrangement=arrangement,
        )

    origin = located(arrangement)
    if not arrangement.places:
        return origin, {}
    from penstock.readers.formats import are_default_names, renamed_arrangement

    try:
        recognition = FormatRecognition(origin, scratch=scratch, index=index)
        is_pack = recognition.own_index(format) is not None
        names = dict(arrangement.places)
        if not is_pack and not are_default_names(recognition.indexed(format).name, origin):
            return origin, {}
    except BaseException:
        origin.close()
        raise
    origin.close()
    return located(renamed_arrangement(arrangement, names)), names


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOpener:
    """Open or build the index of one dataset: its own, or one in the folders that may hold it.

    The arguments are those of `open_index` and `index`.
    """

    origin: Origin
    scratch: Scratch
    index: Folder | None
    verify: Verify | None
    workers: int
    progress: Progress | None = None
    checker: Checker | None = None

    def open(self, format: str) -> Index:
        """Open the index; see `open_index`."""
        check_format(format)
        self._warn_of_lost_copies()
        recognition = self._recognition()
        own = self._own(recognition, format)
        if own is not None:
            return self._index(own, None)
        found = recognition.indexed(format)
        remote = recognition.manifests.remote
        if remote is not None and remote.about.kind == found.name:
            place = recognition.places.remote()
            from penstock.readers.index.index_folders import check_arrangement

            check_arrangement(remote, self.origin, shown="" if place is None else place.url)
            return self._index(remote, place)
        return self._index(*self._upkeep(found, recognition.places).open())

    def open_own(self, format: str) -> Index | None:
        """Return the index that the dataset carries, as a pack does, or None. Raises the same
        errors as `open_index`."""
        own = self._own(self._recognition(), format)
        return None if own is None else self._index(own, None)

    def _own(self, recognition: FormatRecognition, format: str) -> Manifest | None:
        own = recognition.own_index(format)
        arrangement = replace(self.origin.arrangement, max_pixels=None)
        if own is not None and arrangement != DEFAULT_ARRANGEMENT:
            raise ConfigError(
                f"{self.origin.url} is a pack, which contains its schema: manifest=, schema= and "
                "allow_empty= are for other data. Pass them when you pack that data."
            )
        return own

    def recognise(self, format: str) -> Format:
        """Return the format of a dataset that doesn't carry its index. Raises the same errors as
        `open_index`."""
        return self._recognition().indexed(format)

    def rebuild(self, format: str) -> Index:
        """Build the index even if a valid one exists; see `index`."""
        check_format(format)
        if format != AUTO and format_named(format).indexing is None:
            raise ConfigError(
                f'format: got "{format}", the format of packs, but a pack has its own index.'
            )
        recognition = self._recognition()
        if recognition.own is not None or recognition.is_begun:
            raise ConfigError(
                f"{self.origin.url} is a pack, which has its own index: there is nothing to build."
            )
        places, to = recognition.places.for_upload()
        # An existing index in `index=` is replaced, even if it is of another format.
        found = FormatRecognition(self.origin, scratch=self.scratch, index=None).indexed(format)
        built, place = self._upkeep(found, places).rebuild()
        if to is not None:
            from penstock.readers.index.index_folders import upload_index

            upload_index(built, place, to)
        return self._index(built, place if to is None else to)

    def _recognition(self) -> FormatRecognition:
        return FormatRecognition(self.origin, scratch=self.scratch, index=self.index)

    def _upkeep(self, format: Format, places: IndexPlaces) -> IndexMaintenance:
        from penstock.readers.index.maintenance import IndexMaintenance

        return IndexMaintenance(
            origin=self.origin,
            format=format,
            places=places,
            verify=self.verify,
            workers=self.workers,
            progress=self.progress,
            checker=self.checker,
        )

    def _index(self, manifest: Manifest, place: bytes | RemoteFolder | None) -> Index:
        repair = None
        if isinstance(place, bytes):
            from penstock.readers.index.index_folders import is_cached

            if is_cached(place):
                from penstock.readers.index.building import IndexRepair

                repair = IndexRepair(
                    manifest,
                    origin=self.origin,
                    place=place,
                    verify=self.verify,
                    workers=self.workers,
                )
        return index_of(
            manifest, origin=self.origin, place=place, scratch=self.scratch, repair=repair
        )

    def _warn_of_lost_copies(self) -> None:
        if not self.origin.is_local and not self.scratch.is_kept:
            warnings.warn(
                f"{self.origin.url} is remote and cache= isn't given: downloads are stored in a "
                "temporary folder and aren't kept for the next run. Pass cache=, a folder on a "
                "local disk.",
                PenstockWarning,
                stacklevel=4,
            )
