"""Implement `Dataset`: check its arguments, open its index at first use, read and close it."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import (
    ClosedError,
    ConfigError,
    DatasetError,
    FetchError,
    PenstockWarning,
    explain_arguments,
    log,
)
from penstock.cache.base import READ_MODE, ReadMode, Traffic
from penstock.readers.fieldtypes import (
    PLAIN,
    Naming,
    check_names,
    check_selection,
    default_fields,
    not_chosen,
    renamed_field,
    stored_fields,
)
from penstock.readers.files import printable
from penstock.readers.formats import AUTO, OpenShard
from penstock.readers.index import DatasetDescription, Folder, Index, IndexOpener
from penstock.readers.origin import DEFAULT_ARRANGEMENT, Scratch, show
from penstock.readers.reading import SampleReader
from penstock.readers.sources import Contents, Source
from penstock.readers.types import MAX_PIXELS, Ints, Verify

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.cache.blobs import Remote
    from penstock.cache.disk import DiskCache
    from penstock.readers.blocks import Blocks
    from penstock.readers.fieldtypes import ColumnCrop, FieldTypes, SampleBatch
    from penstock.readers.formats import DecodedChunks, DocumentMode, ManifestFile, WindowArgument
    from penstock.readers.origin import LeftOut, Url
    from penstock.readers.reading import FoundRows
    from penstock.readers.remote_shards import RemoteShards


_MOST_PIXELS = 2**30

ALLOWED_LEFT_OUT, WARNED_LEFT_OUT = 0.1, 0.01
"""The share of samples that a dataset may leave out by default, and the share above which each
opening warns."""


@explain_arguments(ConfigError)
class Dataset(Source):
    """A dataset: a folder, a file or several files at a URL. It opens at first use; several threads
    may read.

    ```python
    from penstock import Dataset

    train = Dataset("photos/train")
    print(len(train), train.classes)  # 96 ('beach', 'forest', 'harbour', 'street')
    print(train[0]["image"].shape)  # torch.Size([3, …, …])
    ```

    - url: a local path or any fsspec URL, of a folder or of one file; several files by a pattern
      such as train-{000000..000009}.tar or data/**/*.parquet, or as a list within one store.
    - fields: names, in the order in which a batch has them; "id" is the sample's number
      ("sample_id" if the dataset has a field "id"), and "caption.present" marks the samples that
      have a caption. None: the first image field and "label", else the fields that
      docs/reference/batches.md lists. A mapping also gives the place of each field: {"image":
      "images", "mask": "masks"}, folders or patterns of a folder, columns of a manifest, members of
      tar files; None: the place that has the field's name ({…, "id": None}).
    - format: "auto" or the name of a format.
    - index: the folder for the index of images or tar files; for remote ones also a URL in the same
      store. None: next to them, else the cache folder, else the user's cache directory.
    - cache: a DiskCache through which remote data is read (data on a network mount, too), or a
      folder for one: its limit is the one it was made with, or 90 % of the free space.
    - storage_options: of the store (docs/reference/stores.md).
    - filesystem: any fsspec file system object; url is then a path in it.
    - manifest: a table of a folder's samples, below url or on this machine; False ignores manifests
      in the folder.
    - schema: types of some fields, which override those that are found
      (docs/howto/class-folders.md).
    - sample, stride: windows of arrays and of streams of tokens, as lengths by axis (None: the
      whole axis), for all arrays or by field: (8, None, 256, 256). None: one step along the first
      axis.
    - dtype: of the numbers in files that don't record it.
    - documents: of tokens, "across", "within" or "pack" (docs/howto/tokens.md).
    - vocabulary: the number of token ids; an id that isn't below it makes a sample bad.
    - decoded_bytes: memory for decoded chunks (of Zarr, Parquet, …), in bytes or as "4GB"; None: a
      share of this machine's memory. Further chunks go to the cache folder, if there is one, or are
      decoded again.
    - allow_left_out: the share of bad samples that may be left out (see `left_out`): opening raises
      DatasetError above it, and warns above 0.01.
    - allow_empty: True keeps the class number of a class folder without samples, as torchvision
      does; False raises an error.
    - max_pixels: of the largest image or mask that is decoded; None is 2**27 (134 million), or the
      limit with which a pack was made.
    - split: the part of a dataset whose files name its parts (Pascal VOC, YOLO), such as "val";
      None is "train".

    Raises ConfigError for invalid arguments at once. Errors of reading or building the index (see
    `index`) are raised at the first use.
    """

    def __init__(
        self,
        url: Url,
        *,
        fields: Sequence[str] | Mapping[str, str | None] | None = None,
        format: str = AUTO,
        index: Folder | None = None,
        cache: DiskCache | Folder | None = None,
        storage_options: Mapping[str, Any] | None = None,
        filesystem: Any | None = None,
        manifest: ManifestFile | None = None,
        schema: FieldTypes | None = None,
        sample: WindowArgument | None = None,
        stride: WindowArgument | None = None,
        dtype: str | None = None,
        documents: DocumentMode | None = None,
        vocabulary: int | None = None,
        decoded_bytes: int | str | None = None,
        allow_left_out: float = ALLOWED_LEFT_OUT,
        allow_empty: bool = False,
        max_pixels: int | None = None,
        split: str | None = None,
    ) -> None:
        sampling = None
        if any(given is not None for given in (sample, stride, dtype, documents, vocabulary)):
            from penstock.readers.formats import check_sampling

            sampling = check_sampling(sample, stride, dtype, documents, vocabulary)
        if not isinstance(allow_left_out, bool | int | float) or not 0 <= allow_left_out <= 1:
            raise ConfigError(
                f"allow_left_out: got {allow_left_out!r}, wanted the largest share of samples that "
                "may be left out, 0 to 1, such as 0.2; True allows any."
            )
        if decoded_bytes is not None:
            from penstock.cache.base import parse_size

            decoded_bytes = parse_size(decoded_bytes, what="decoded_bytes")
        self._set(
            _Arguments(
                description=DatasetDescription(
                    url=url,
                    format=format,
                    index=index,
                    cache=cache,
                    storage_options=storage_options,
                    filesystem=filesystem,
                    manifest=manifest,
                    fields=fields if isinstance(fields, Mapping) else None,
                    schema=schema,
                    sampling=sampling,
                    allow_empty=allow_empty,
                    max_pixels=max_pixels,
                    split=split,
                ),
                names=check_names(tuple(fields) if isinstance(fields, Mapping) else fields),
                decoded_bytes=decoded_bytes,
                allowed=float(allow_left_out),
            )
        )

    def _set(self, arguments: _Arguments) -> None:
        self._arguments, self._description = arguments, arguments.description
        self.url = show(self._description.url)
        self.is_one_url = not isinstance(self._description.url, list | tuple)
        self._naming = PLAIN
        self._fields = arguments.names
        self._scratch = Scratch(self._description.cache)
        self._opening = threading.Lock()
        self._reader: SampleReader | None = None
        self._contents: Contents | None = None
        self._closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments: a spawned worker opens the same dataset again."""
        return _make_dataset, (self._arguments,)

    def select(self, *fields: str) -> Dataset:
        """Return the same data with other fields, as a dataset that opens and closes on its own.

        fields: names in the order that batches have, as for `Dataset(fields=)`, which also
        documents the errors.
        """
        return self._with(names=check_names(fields))

    def _with(self, **changes: Any) -> Dataset:
        return _make_dataset(replace(self._arguments, **changes))

    def _renamed(self, names: Mapping[str, str], made: dict[int, Source]) -> Source:
        if id(self) not in made:
            chosen, renames = self._arguments.names, (*self._arguments.renames, dict(names))
            if chosen is not None:
                chosen = check_names([renamed_field(name, names) for name in chosen])
            made[id(self)] = self._with(names=chosen, renames=renames)
        return made[id(self)]

    def open(self, *, verify: Verify | str | None = None, workers: int | None = None) -> Index:
        """Open the index, or build it; later calls cost nothing. verify, workers, and errors: as
        for `index`. Raises ConfigError for fields that the dataset lacks."""
        return self._open(verify=verify, workers=workers).index

    def unindexed_bytes(self) -> int:
        """Return the bytes that building the index would read; see `IndexOpener`."""
        opener = IndexOpener.of(self._description, self._scratch)
        with closing(opener.origin):
            return opener.unindexed_bytes()

    def _open(
        self, *, verify: Verify | str | None = None, workers: int | None = None
    ) -> SampleReader:
        if self._reader is not None and not self._closed:
            return self._reader
        with self._opening:
            if self._closed:
                raise ClosedError(f"{self!r} is closed; make a new dataset.")
            if self._reader is None:
                opener = IndexOpener.of(
                    self._description, self._scratch, verify=verify, workers=workers
                )
                try:
                    self._reader = self._opened(opener)
                except BaseException:
                    opener.origin.close()
                    raise
            return self._reader

    def _opened(self, opener: IndexOpener) -> SampleReader:
        """Open the index, and choose the fields. Raises ConfigError for fields that it lacks."""
        chosen, allowed, url = self._arguments.names, self._arguments.allowed, self.url
        index = opener.open(warns=allowed is not None)
        if allowed is not None:
            check_left_out(index, allowed)
        naming = Naming.of(index.schema, opener.renames, self._arguments.renames, url=url)
        if chosen is None:  # by the names in the index
            defaults = index.format.default_fields(index.schema)
            defaults = defaults or default_fields(index.schema, index.lacking)
            chosen = tuple(map(naming.new_name, defaults))
        fields = check_selection(
            chosen,
            naming.schema,
            naming.new(index.lacking),
            url=url,
            has_reasons=index.format.name in ("parquet", "arrow", "zarr", "npy"),
            left_out=index.about.left_out,
        )
        if self._fields is None and (note := not_chosen(index.schema, index.lacking)):
            log.warning("%s: %s", url, note)
        self._naming, self._fields = naming, fields
        stored = stored_fields(map(naming.stored_name, fields), index.schema)
        index = index.keeping(self._arguments.kept or stored)
        self._chunks = _kept_chunks(
            index, self._scratch, max_bytes=self._arguments.decoded_bytes, url=url
        )
        return SampleReader(index, fields=stored)

    @property
    def index(self) -> Index:
        """The index, which is opened at first use."""
        return self._open().index

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a batch, in order."""
        if self._fields is None:
            self._open()
        assert self._fields is not None
        return self._fields

    def stored_fields(self, fields: Sequence[str]) -> tuple[str, ...]:
        """Return the names of fields in the index, if they were renamed."""
        self._open()
        return tuple(map(self._naming.stored_name, fields))

    @property
    def is_plain(self) -> bool:
        """Return True if the URL alone determines the samples and fields."""
        data, arguments = self._description, self._arguments
        if data.format != AUTO or isinstance(data.url, tuple) or arguments.names:
            return False
        return not arguments.renames and data.arrangement() == DEFAULT_ARRANGEMENT

    @property
    def kind(self) -> str:
        """The format of the data."""
        return self.index.kind

    @property
    def _is_open(self) -> bool:
        """True if the index is open, so that showing the dataset costs little."""
        return self._reader is not None and not self._closed

    @property
    def is_self_contained(self) -> bool:
        """True if the data hold their own index, as packs do."""
        return self.index.is_self_contained

    def _largest(self, name: str) -> int:
        bounds = self.index.summary(self._naming.stored_name(name)).bounds
        return super()._largest(name) if bounds is None else int(bounds[1])

    def _own_left_out(self) -> Mapping[str, LeftOut]:
        return (self._reader or self._open()).index.left_out

    @property
    def contents(self) -> Contents:
        """The contents that readers by shards need; opens the index at first use."""
        index, most = self.index, self._description.max_pixels
        if self._contents is None:
            self._contents = contents_of(index, self._naming, max_pixels=most)
        return self._contents

    @property
    def cache_folder(self) -> str | None:
        """The user's cache folder; None if there is none."""
        return self._scratch.path

    @property
    def remote(self) -> Remote | None:
        """The access to a remote dataset; None for a local one, and before it is open."""
        return self._reader.index.remote if self._reader is not None else None

    @property
    def remote_shards(self) -> RemoteShards | None:
        """The shards of a remote dataset; None for a local one."""
        index = self.index
        if index.remote is None:
            return None
        from penstock.readers.remote_shards import RemoteShards

        return RemoteShards.of_dataset(index.remote, index)

    def __repr__(self) -> str:
        if self._reader is None:
            return f"Dataset({self.url!r})"
        left_out = sum(each.samples for each in self._own_left_out().values())
        suffix = f", {left_out:,} left out" if left_out else ""
        return f"Dataset({self.url!r}, {self._reader.index.samples} samples{suffix})"

    def read(
        self,
        rows: Ints,
        *,
        mode: ReadMode = READ_MODE,
        bad: dict[int, str] | None = None,
        fields: Sequence[str] | None = None,
        crops: Mapping[str, ColumnCrop] | None = None,
        blocks: Blocks | None = None,
    ) -> SampleBatch:
        """Read samples in the order of rows, and check the bytes of each field against their
        CRC-32C.

        - rows: (shard, row), int64, shape (n, 2), n ≥ 0.
        - mode: "copy" copies each sample from the map of its shard and checks the copy, which no
          other process can change; "pread" reads into fresh memory (for mounts whose files may
          shrink under a map); "mmap" returns read-only views, whose bytes change if the file is
          written after the check. Arrays of one shape in packs are always copied from the map, and
          checked block by block when a block is first read.
        - bad: None, or a dict that collects the bad samples, as position in rows -> reason: a
          checksum that is wrong even after a second fetch; a file of a folder that is gone, changed
          or unreadable. These samples are empty except for their ids and the fields that need no
          reading; without the dict the batch raises an error.
        - fields: of the schema; None: those of the dataset.
        - crops: by field, the part of each sample of an array that is wanted, inside the sample:
          the batch has these parts, and only the chunks that they touch are read.
        - blocks: allocates memory for large copies; None uses the dataset's own.

        Raises CorruptSampleError (carries sample_id), CorruptShardError, IndexChangedError (files
        differ from what was indexed), FetchError, ClosedError, ConfigError (rows that don't exist).
        """
        reader, naming = self._open(), self._naming
        batch = reader.read(
            rows,
            mode=mode,
            bad=bad,
            fields=naming.stored(fields),
            crops=crops and {naming.stored_name(name): crop for name, crop in crops.items()},
            blocks=blocks,
        )
        return naming.batch(batch)

    def _find(self, rows: Ints) -> FoundRows | None:
        """Return where samples lie in memory; None if they aren't plain rows."""
        found = self._open().find(rows)
        if found is None or self._naming.is_plain:
            return found
        return replace(found, columns=self._naming.new(found.columns))

    @property
    def _whole_reader(self) -> SampleReader | None:
        reader = self._open()
        return reader if self._naming.is_plain else None

    def lengths(self, name: str, rows: Ints) -> Ints:
        """Return the first length of each sample of a field, int64, shape (n,)."""
        return self._open().lengths(self._naming.stored_name(name), rows)

    def image_dims(self, shard: int, name: str) -> NDArray[np.int32]:
        """Return the upright height and width of an image field in a shard, int32, shape (samples,
        2)."""
        place = self.index.layout.table.spans[self._naming.stored_name(name)]
        assert place.height is not None, name
        table = self.index.open(shard).table
        return table[:, place.height : place.height + 2].astype(np.int32)

    def is_near(self, shard: int) -> bool:
        """Return True if a shard's table can be read without the remote."""
        return self.index.is_near(shard)

    def _names_of(self, rows: Ints) -> list[str]:
        """Return the names of the samples (shard, row), as `names` does."""
        reader, names = self._open(), np.empty(len(rows), object)
        for number in np.unique(rows[:, 0]).tolist():  # so that one shard's names are in memory
            places = np.flatnonzero(rows[:, 0] == number)
            names[places] = _names(reader, number, rows[places, 1].tolist())
        return names.tolist()

    @property
    def bytes_fetched(self) -> int:
        """Bytes downloaded so far; 0 for a local dataset."""
        return self.traffic().bytes_remote

    def traffic(self) -> Traffic:
        """Return the bytes read so far, by tier; for a local dataset only bytes_disk."""
        return self._reader.traffic() if self._reader is not None else Traffic()

    def release(self, shards: Iterable[int]) -> None:
        """Close open shards, so that the cache may drop their blobs; delivered batches keep
        theirs."""
        if self._reader is not None:
            self._reader.shards.release(shards)

    def give_back(self) -> None:
        """Close those open shards that the cache needn't keep for this dataset's loaders."""
        if self._reader is not None:
            self._reader.shards.give_back()

    def close(self) -> None:
        """Unmap shards and remove temporary downloads; delivered views stay valid. Safe to call
        twice."""
        with self._opening:
            self._closed = True
            if self._reader is not None:
                self._reader.close()
                for chunks in self._chunks:
                    chunks.close()
                self._reader.index.origin.close()
            self._scratch.close()


def _names(reader: SampleReader, number: int, rows: list[int]) -> list[str]:
    """Return the names of samples of one shard: for a pack, those in its sources."""
    index, known = reader.index, None
    try:
        (shard,) = reader.shards.get([number])
        if not index.is_self_contained:
            return list(map(shard.name, rows))
        known = shard.source_names()
    except (DatasetError, FetchError):  # a report needs some name, even of a damaged shard
        if not index.is_self_contained:
            raise
    if known is None:
        return [f"{index.shard_name(number)}[{row}]" for row in rows]
    return [printable(known[row]) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    """The checked arguments of a dataset.

    names: the fields of a batch; None for the default ones. renames: the arguments of `rename`, in
    order. decoded_bytes: memory for decoded chunks. allowed: the share of samples that may be left
    out; None for data that is read once, to be packed. kept: the stored fields whose chunks' bytes
    are kept; empty for those of a batch.
    """

    description: DatasetDescription
    names: tuple[str, ...] | None = None
    renames: tuple[Mapping[str, str], ...] = ()
    decoded_bytes: int | None = None
    allowed: float | None = None
    kept: tuple[str, ...] = ()


def dataset_of(description: DatasetDescription) -> Dataset:
    """Return a dataset that is read once, to be packed."""
    names = None if description.fields is None else check_names(tuple(description.fields))
    return _make_dataset(_Arguments(description=description, names=names))


def _make_dataset(arguments: _Arguments) -> Dataset:
    """Make a dataset from arguments that were checked before."""
    dataset = Dataset.__new__(Dataset)
    dataset._set(arguments)
    return dataset


def check_left_out(index: Index, allowed: float = 1.0) -> None:
    """Warn if an index leaves out many samples; if all may be left out, as in commands, also that a
    Dataset refuses so many by default. Raises DatasetError if it leaves out more than allowed."""
    if not index.left_out:
        return
    from penstock.readers.origin import QUARANTINE, left_out_lines, left_out_total, percent

    total = left_out_total(index.left_out)
    share = total / (index.samples + total)
    if share <= min(allowed, WARNED_LEFT_OUT):
        return
    head, *reasons = left_out_lines(index.left_out, samples=index.samples)
    rejected = f"The rejected files are listed in {index.place}/{QUARANTINE.decode()}."
    remedy = "repair or remove them (a list of classes may lack a name), "
    if any("class folder" in reason for reason in index.left_out):
        remedy += "list all files and their labels in a table and pass it as manifest=, "
    remedy += f"or accept it with Dataset(…, allow_left_out={math.ceil(share * 100) / 100:.2g})."
    if share > allowed:
        raise DatasetError(
            f"{index.url}: {head} {'; '.join(reasons)}. {rejected} At most {percent(allowed)} may "
            f"be left out: {remedy}"
        )
    if allowed == 1 and share > ALLOWED_LEFT_OUT:
        rejected += f" By default, Dataset(…) allows {percent(ALLOWED_LEFT_OUT)}: {remedy}"
    lines = "\n  ".join([f"{index.url}: {head}", *reasons])
    warnings.warn(f"{lines}\n{rejected}", PenstockWarning, stacklevel=6)


def _kept_chunks(
    index: Index, scratch: Scratch, *, max_bytes: int | None, url: str
) -> tuple[DecodedChunks, ...]:
    """Return the store of decoded chunks, if any: in memory within the user's bound, and in the
    cache folder for remote data, or for local data if the user gave one."""
    if not index.layout.stored("chunks"):
        return ()
    from penstock.readers.formats import DecodedChunks  # other formats don't load it

    files = None
    if scratch.is_kept or index.remote is not None:
        from penstock.readers.formats import ChunkFiles

        files = ChunkFiles(scratch.disk_cache, uri=url)
    chunks = DecodedChunks(max_bytes=max_bytes, files=files, url=url)
    index.keep_chunks(chunks)
    return (chunks,)


def _unit_bytes(index: Index) -> float:
    """Return the mean size of a decode unit over all fields: decoded for fields of one shape, else
    stored."""
    if (units := index.units) is None:
        return 0.0
    forms = {name: type.form for name, type in index.schema.items()}
    dense = {name: form for name, form in forms.items() if form and not form.is_ragged}
    sample_bytes = sum(math.prod(form.fixed_shape) * form.dtype.itemsize for form in dense.values())
    stored = int(index.manifest.bytes_of(name for name in forms if name not in dense).sum())
    return (sample_bytes * index.samples + stored) / max(1, sum(map(len, units)))


def copy_keeping(dataset: Dataset, fields: tuple[str, ...]) -> Dataset:
    """Return a copy of the dataset, to be opened and closed by the caller, that keeps the chunks'
    bytes of these fields even if its batches don't have them."""
    return dataset._with(kept=dataset.stored_fields(fields))


def open_shard(dataset: Dataset, number: int) -> OpenShard:
    """Return a shard of a dataset, which is opened unless it is open."""
    (shard,) = dataset._open().shards.get([number])
    return shard


def contents_of(
    index: Index, naming: Naming | None = None, *, max_pixels: int | None = None
) -> Contents:
    """Return the contents of an index, as readers by shards need them. naming: of the fields.
    max_pixels: of the user; None means that of the index."""
    naming = naming or Naming(schema=index.schema)
    longest = {}
    for name, kind in index.schema.items():
        form, lengths = kind.form, index.summary(name).lengths
        if form is not None and form.is_ragged and form.shape[0] is None and lengths:
            longest[name] = lengths[0][1]
    most = index.about.settings.get("max_pixels")  # a manifest may come from an untrusted source
    own = min(most, _MOST_PIXELS) if type(most) is int and most > 0 else MAX_PIXELS
    return Contents(
        schema=naming.schema,
        sizes=index.sizes,
        shard_bytes=index.shard_bytes,
        id_end=index.samples,
        fingerprint=index.fingerprint,
        icc=index.about.icc,
        shuffled=index.about.shuffled,
        images=naming.new(index.images),
        files=index.files,
        is_file_per_sample=index.format.is_file_per_sample,
        units=index.units,
        unit_bytes=_unit_bytes(index),
        longest=naming.new(longest),
        is_encoded=index.format.is_encoded,
        are_checked=not index.manifest.is_of_chunks,
        lacking=naming.new(index.lacking),
        max_pixels=max_pixels or own,
    )
