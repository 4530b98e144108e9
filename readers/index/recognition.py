"""Which format a dataset is of: what `format=` says, else what its index or its root tells."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import ConfigError, CorruptShardError, DatasetNotFoundError
from penstock.readers.files.names import printable
from penstock.readers.formats.registry import (
    ARRAYS,
    AUTO,
    FALLBACK,
    format_named,
    format_of_manifests,
    formats,
    guests,
    has_guests,
    is_told_by_names,
    shows_fallback,
)
from penstock.readers.formats.sampling import Sampling
from penstock.readers.index.manifest_lookup import OWN_MANIFEST, REPACK, ManifestLookup
from penstock.readers.origin.absent import not_a_folder
from penstock.readers.origin.local import LocalFolder
from penstock.readers.origin.unread import extension

if TYPE_CHECKING:
    from penstock.readers.formats.format import Format
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.index.places import Places
    from penstock.readers.origin.origin import Origin

_MANY_SAMPLES = 2**18


class Recognition:
    """Tells the format of one dataset. places: where an index of it may be."""

    def __init__(self, origin: Origin, places: Places) -> None:
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
        found = format_of_manifests()
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
            if not is_told_by_names(format):
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
        if has_guests() and (fallback is None or not shows_fallback(origin)):
            foreign = (each for each in guests() if each.recognises(origin))
            if (guest := next(foreign, None)) is not None:
                return guest
        if fallback is None:
            raise self._unknown()
        return fallback

    def _unknown(self) -> ConfigError:
        """The error for files that no format takes."""
        selection, url = self._origin.selection, self._origin.url
        if selection is not None and selection.is_one:
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
