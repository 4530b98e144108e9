"""Recognise datasets of NumPy files, and list their shards: .npy files whose first axis is samples,
and .npz files.

A dataset is recognised by the names at its root or in its URL. `array_reader` reads its samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from penstock.cache import ConfigError
from penstock.readers.files import extension, is_passed_over
from penstock.readers.formats.array_reader import ArrayReader
from penstock.readers.formats.chunked import ChunkedDataset, ChunkFormat
from penstock.readers.formats.npy.npy_pieces import read_notes

if TYPE_CHECKING:
    from penstock.readers.formats.chunked import ChunkedShardFacts, ChunkReader
    from penstock.readers.formats.format import DatasetFiles
    from penstock.readers.origin import Origin

_FILE_TABLES = frozenset((b"metadata.csv", b"metadata.jsonl", b"metadata.parquet"))
"""If a folder holds one of these tables, the table describes the folder's files."""


def _has_arrays(origin: Origin) -> bool:
    """Return True if a dataset consists of .npy or .npz files: if the URL names only such files, or
    if its folder holds some and nothing that they could belong to (images, subfolders, a table of
    files)."""
    names = origin.names()
    files = [name for name in names.files if not is_passed_over(name.rpartition(b"/")[2])]
    arrays = [name for name in files if extension(name) in ("npy", "npz")]
    if origin.selection is not None:
        return bool(arrays) and len(arrays) == len(files)
    if not arrays or _FILE_TABLES.intersection(files):
        return False
    from penstock.readers.files import IMAGES  # most folders hold no arrays

    folders = [name for name in names.folders if not is_passed_over(name)]
    return not folders and not any(extension(name) in IMAGES for name in files)


class NpyFormat(ChunkFormat):
    """The format of *.npy and *.npz files."""

    name: ClassVar[str] = "npy"
    sampling: ClassVar[tuple[str, ...]] = ("sample", "stride")
    extensions: ClassVar[frozenset[str]] = frozenset(("npy", "npz"))

    def recognises(self, origin: Origin) -> bool:
        """Return True if the URL names such files, or a folder of them that holds nothing they
        could belong to.

        A folder of .npy files alone is read as one sample per file by the `folder` format, unless
        sample= or another such argument is given.
        """
        if not _has_arrays(origin):
            return False
        if origin.selection is not None or origin.arrangement.sampling:
            return True
        return not any(extension(name) == "npy" for name in origin.names().files)

    def files(self, origin: Origin) -> DatasetFiles:
        """List the files; raise ConfigError too if there are .npy and .npz files."""
        found = super().files(origin)
        if len({extension(entry.name) for entry in found.entries}) > 1:
            raise ConfigError(
                f"{origin.url}: the dataset has both .npy and .npz files. Name those of one kind, "
                f"such as {origin.url.rstrip('/')}/*.npy."
            )
        return found

    def index(self, origin: Origin, files: DatasetFiles, *, workers: int) -> ChunkedDataset:
        """Read the headers of all files and return the shards."""
        from penstock.readers.formats.npy.npy_fields import choose_samples, read_groups
        from penstock.readers.formats.npy.npy_pieces import cut_shards

        groups = read_groups(origin, files.entries, workers=workers)
        chosen = choose_samples(origin, groups)
        return ChunkedDataset(
            schema=chosen.schema,
            shards=list(cut_shards(chosen)),
            left_out=groups[0].left_out,
            unnamed=chosen.too_short,
        )

    def reader(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard."""
        pieces, is_by_file = read_notes(shard)
        return ArrayReader(shard, pieces, is_by_file=is_by_file)


FORMAT = NpyFormat()
