"""Open a dataset's index, or build it on first use.

The format is what `format=` says, else what the index or the dataset's root shows. A pack has its
manifest in its own folder. The index of other data is looked for in `index=`, else beside the data
(`photos.penstock`), in the cache folder and in the user's cache directory, and built in the first
of these that can be written; where the data changed since, it is brought up to date. A remote
dataset isn't listed again on opening (stores list a page at a time) if its index lies beside it, in
the cache folder or in `index=`: `penstock index` does that. Nothing remote is written but where
`penstock index --out` says.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import ConfigError, CorruptShardError, DatasetNotFoundError, PenstockWarning
from penstock.readers.files import extension, printable
from penstock.readers.formats import (
    ARRAYS,
    AUTO,
    FALLBACK,
    Sampling,
    are_default_names,
    check_format,
    external_formats,
    format_named,
    formats,
    has_external_formats,
    indexing_of,
    is_recognised_by_names,
    looks_like_fallback,
    renamed_arrangement,
)
from penstock.readers.index.index import index_of
from penstock.readers.index.index_folders import (
    OWN_MANIFEST,
    REPACK,
    Folder,
    IndexPlaces,
    ManifestLookup,
    check_arrangement,
    is_kept,
    upload_index,
)
from penstock.readers.origin import AS_IT_LIES, LocalFolder, Scratch, locate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.formats import Format
    from penstock.readers.index.building import Checker
    from penstock.readers.index.index import Index
    from penstock.readers.index.maintenance import IndexMaintenance
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.origin import Arrangement, Origin, RemoteFolder, Url
    from penstock.readers.types import Progress, Verify

_MANY_SAMPLES = 2**18


class FormatRecognition:
    """Tells the format of one dataset. places: where an index of it may be."""

    def __init__(self, origin: Origin, places: IndexPlaces) -> None:
        self._origin, self._places = origin, places
        self.manifests = ManifestLookup(origin, places)

    def own_index(self, format: str) -> Manifest | None:
        """The manifest of a dataset that carries its index (a pack), None of any other. Raises
        DatasetNotFoundError (an unfinished one), and as open_index does."""
        if format != AUTO and format_named(format).indexing is not None:
            return None
        own = self.manifests.own
        if own is not None:
            self._check_large(own)
            if self._places.index is not None:
                raise ConfigError(
                    f"{self._origin.url} is a pack and has its own index: drop index=."
                )
            return own
        if format != AUTO or (self.manifests.separate is None and self.manifests.is_begun):
            raise DatasetNotFoundError(
                f"{self._origin.url}: this pack isn't complete: its manifest "
                f"({OWN_MANIFEST.decode()}), which is written last, is missing. Run the same "
                "`penstock pack` again: it goes on where it stopped; or copy the pack again with "
                "its `_penstock` folder."
            )
        return None

    def indexed(self, format: str) -> Format:
        """The format of a dataset that doesn't carry its index. Raises ConfigError where that can't
        be told, FetchError."""
        found = self._indexed(format)
        unit = Sampling.of(self._origin.arrangement).unit
        if unit == "file" and found.name != ARRAYS:
            raise ConfigError(
                f'sample: got "file", which is for files of arrays (.npy, .npz), and '
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
        """The format whose samples a manifest lists."""
        found = format_named(FALLBACK)
        if format not in (AUTO, found.name) or self._origin.selection is not None:
            told = f'format="{format}"' if format != AUTO else "files that are named"
            raise ConfigError(
                f"manifest: a table lists the files of a folder, and {self._origin.url} is given "
                f'with {told}. Leave one out, or pass format="{found.name}".'
            )
        return found

    def _selected(self, format: str) -> Format:
        """The format of files that the URL names. What `format=` says counts, but for formats of
        folders."""
        if format not in (AUTO, FALLBACK) and format_named(format).indexing is not None:
            return format_named(format)
        found = self._by_root()
        if format not in (AUTO, found.name):
            raise ConfigError(
                f"format: got {format!r} for {self._origin.url}, which names {found.name} "
                "files. Leave format out."
            )
        return found

    def _by_root(self) -> Format:
        """The one that recognises the dataset: of ours, then of other packages', which are loaded
        only where there is nothing that a folder of ours shows. Raises ConfigError where names
        say several."""
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
            told = " or ".join(f'format="{format.name}"' for format in found)
            raise ConfigError(
                f"{origin.url}: holds files of several kinds. Say which are the dataset: {told} "
                "(--format); or name those files, such as data/*.parquet."
            )
        if found:
            return found[0]
        fallback = next((f for f in ours if f.recognises(origin)), None)
        if has_external_formats() and (fallback is None or not looks_like_fallback(origin)):
            foreign = (each for each in external_formats() if each.recognises(origin))
            if (guest := next(foreign, None)) is not None:
                return guest
        if fallback is None:
            raise self._unknown()
        return fallback

    def _unknown(self) -> ConfigError:
        """The error for files that no format takes."""
        selection, url = self._origin.selection, self._origin.url
        if selection is not None and selection.is_one:
            from penstock.readers.origin import not_a_folder

            return ConfigError(not_a_folder(url))
        kinds = Counter(extension(name) or "no extension" for name in self._origin.names().files)
        if len(kinds) < 2:
            return ConfigError(
                f"{url}: no format recognises this dataset. Say which it is: format=."
            )
        told = ", ".join(f"{count:,} .{kind}" for kind, count in kinds.most_common(4))
        return ConfigError(
            f"{url}: names files of several kinds ({told}), which no format reads together. Name "
            "those of one kind, such as data/*.parquet, or say which it is: format=."
        )

    def _check_large(self, own: Manifest) -> None:
        """Shards that say they hold very much are looked at before anything is sized by that."""
        if not isinstance(self._origin, LocalFolder):
            return
        for shard in np.flatnonzero(own.samples > _MANY_SAMPLES).tolist():
            name, wanted = own.names[shard], int(own.shard_bytes[shard])
            found = self._origin.find(name)
            if found is None or found[0] != wanted:
                raise CorruptShardError(
                    f"{self._origin.url}: {printable(name)} isn't there or has another size than "
                    f"the manifest says ({wanted:,} bytes). {REPACK}"
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
    """The origin behind a URL, and new names of fields, each with that which its index has.

    A place in `fields=` is where a field lies; where nothing lies there it is the name of a field
    that the data have without a word: these fields get other names, and the index is that of the
    data as they lie. Raises as `locate` and `open_index` do.
    """
    check_format(format)

    def located(arrangement: Arrangement) -> Origin:
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
    try:
        recognition = FormatRecognition(
            origin, IndexPlaces(origin=origin, scratch=scratch, index=index)
        )
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
    """Opens or builds the index of one dataset: its own, or one in the places that may hold it.

    The arguments are those of open_index and index.
    """

    origin: Origin
    scratch: Scratch
    index: Folder | None
    verify: Verify | None
    workers: int
    progress: Progress | None = None
    checker: Checker | None = None

    @property
    def places(self) -> IndexPlaces:
        """Where an index may be."""
        return IndexPlaces(origin=self.origin, scratch=self.scratch, index=self.index)

    def open(self, format: str) -> Index:
        """Open the index; see open_index."""
        check_format(format)
        self._warn_of_lost_copies()
        recognition = self._recognition()
        own = self._own(recognition, format)
        if own is not None:
            return self._index(own, None)
        found = recognition.indexed(format)
        remote = recognition.manifests.remote
        if remote is not None and remote.about.kind == found.name:
            place = self.places.remote()
            check_arrangement(remote, self.origin, shown="" if place is None else place.url)
            return self._index(remote, place)
        return self._index(*self._upkeep(found, self.places).open())

    def open_own(self, format: str) -> Index | None:
        """The index that the dataset carries itself, as a pack does; None where it has none. Raises
        as open_index does."""
        own = self._own(self._recognition(), format)
        return None if own is None else self._index(own, None)

    def _own(self, recognition: FormatRecognition, format: str) -> Manifest | None:
        own = recognition.own_index(format)
        said = replace(self.origin.arrangement, max_pixels=None)
        if own is not None and said != AS_IT_LIES:
            raise ConfigError(
                f"{self.origin.url} is a pack, which carries its schema: manifest=, schema= and "
                "allow_empty= say how other data lie. Pack those with them."
            )
        return own

    def foreign(self, format: str) -> Format:
        """The format of a dataset that doesn't carry its index. Raises as open_index does."""
        return self._recognition().indexed(format)

    def rebuild(self, format: str) -> Index:
        """Build the index whatever is there; see `index`."""
        check_format(format)
        if format != AUTO and format_named(format).indexing is None:
            raise ConfigError(
                f'format: got "{format}", which is a pack, and a pack has its own index.'
            )
        manifests = self._recognition().manifests
        if manifests.own is not None or manifests.is_begun:
            raise ConfigError(
                f"{self.origin.url} is a pack, and a pack has its own index: nothing to do."
            )
        places, to = self.places.for_upload()
        # What is at `index=` now is replaced, whatever it is.
        found = FormatRecognition(self.origin, replace(self.places, index=None)).indexed(format)
        built, place = self._upkeep(found, places).rebuild()
        if to is not None:
            upload_index(built, place, to)
        return self._index(built, place if to is None else to)

    def _recognition(self) -> FormatRecognition:
        return FormatRecognition(self.origin, self.places)

    def _upkeep(self, format: Format, places: IndexPlaces) -> IndexMaintenance:
        # What a dataset that carries its index never needs isn't imported for it; so below.
        from penstock.readers.index.maintenance import IndexMaintenance

        return IndexMaintenance(
            self.origin,
            format=format,
            indexing=indexing_of(format),
            places=places,
            verify=self.verify,
            workers=self.workers,
            progress=self.progress,
            checker=self.checker,
        )

    def _index(self, manifest: Manifest, place: bytes | RemoteFolder | None) -> Index:
        mender = None
        if isinstance(place, bytes) and is_kept(place):
            from penstock.readers.index.building import IndexRepair

            mender = IndexRepair(
                manifest, origin=self.origin, place=place, verify=self.verify, workers=self.workers
            )
        return index_of(
            manifest, origin=self.origin, place=place, scratch=self.scratch, mender=mender
        )

    def _warn_of_lost_copies(self) -> None:
        if not self.origin.is_local and not self.scratch.is_kept:
            warnings.warn(
                f"{self.origin.url} is remote and cache= isn't given: downloads go to a temporary "
                "folder and aren't kept for the next run. Pass cache=, a folder on a local disk.",
                PenstockWarning,
                stacklevel=4,
            )
