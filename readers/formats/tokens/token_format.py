"""Recognise datasets of token ids, describe their shards, and read sequences of tokens.

The files are flat, or Megatron's .bin files with an .idx file that gives their documents. A shard
is one extent of a file, and it is cut into sequences by arithmetic.

Layout of a Megatron .idx file, all little-endian (Megatron-LM,
megatron/core/datasets/indexed_dataset.py):

- nine bytes of magic, the version as u64, the code of a dtype as u8, the numbers of sequences and
  of document borders as u64;
- the tokens of each sequence as i32;
- the first byte of each sequence as i64;
- the borders as i64: numbers of sequences; the first is 0, the last is the number of all sequences;
- optionally, a byte for each sequence that states its mode (0: text).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError, log, ordered
from penstock.readers.fieldtypes import Array, RaggedColumn, Schema, Tokens, Value, read_npy_header
from penstock.readers.files import is_passed_over, printable
from penstock.readers.formats.array_windows import place_numbers
from penstock.readers.formats.candidates import PART_BYTES
from penstock.readers.formats.chunked import ChunkedDataset, ChunkFormat, ChunkReader
from penstock.readers.formats.dataset_arguments import ALL_FIELDS, DocumentMode, Sampling
from penstock.readers.formats.extents import ChunkedShard
from penstock.readers.formats.format import DatasetFiles
from penstock.readers.formats.open_shard import StridedRows
from penstock.readers.formats.tokens.token_sequences import (
    DOCUMENT,
    POSITION,
    TOKENS,
    UNCUT,
    Cut,
    ShardSequences,
    TokenNotes,
    document_parts,
    sequence_count,
    slice_documents,
    stream_parts,
)
from penstock.readers.formats.unindexed_files import open_data_file, refusing
from penstock.readers.origin import Entry, Origin, left_out_for
from penstock.readers.types import Ints, Numbers, accepted, offsets_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.readers.fieldtypes import Column
    from penstock.readers.formats.chunk_data import ShardData
    from penstock.readers.formats.chunked import ChunkedShardFacts, Crops, Parts
    from penstock.readers.formats.open_shard import Places


MAGIC = b"MMIDIDX\0\0"
MAX_SEQUENCES = 2**27
"""The most sequences of an .idx file: 134 million, which take 6 GB while they are indexed."""

_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_NPY_HEAD_BYTES = 10_012

IDX, BIN, NPY = b".idx", b".bin", b".npy"


Pair = tuple["Entry", "Entry | None"]
"""A file of tokens, and its .idx file if it has one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenFile:
    """The layout of one file of tokens.

    dtype: numpy's `dtype.str`. start: byte of its first token. documents: the first token of each
    document, and the end of the last, int64, shape (documents + 1,); None if the file doesn't
    record them. checksum: CRC-32C of its .idx file.
    """

    entry: Entry
    dtype: str
    start: int = 0
    tokens: int
    documents: Ints | None = None
    checksum: int = 0


def read_idx(origin: Origin, entry: Entry, data: Entry) -> TokenFile:
    """Read and check an .idx file. data: its .bin file.

    Raises DatasetError if it is damaged or doesn't match its .bin file; errors of reading pass
    through.
    """
    where = f"this isn't the index of {printable(data.name)}: "
    remedy = "Fetch or write both again, or remove them from the folder."
    with refusing(entry, where, remedy=remedy), open_data_file(origin, entry) as file:
        head = file.read_at(0, _HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(MAGIC):
            raise ValueError("it doesn't begin as a Megatron index does (MMIDIDX)")
        _, version, code, sequences, borders = _HEADER.unpack(head)
        if version != 1 or code not in _DTYPES:
            raise ValueError(
                f"its version is {version}, and its numbers have the dtype code {code}; expected "
                f"version 1, and one of {_DTYPES}"
            )
        end = _HEADER.size + 12 * sequences + 8 * borders
        is_possible = sequences <= MAX_SEQUENCES and borders <= sequences + 1
        if not is_possible or entry.size_bytes not in (end, end + sequences):
            raise ValueError(
                f"it claims {sequences:,} sequences (at most {MAX_SEQUENCES:,} are read) and "
                f"{borders:,} borders of documents, and has {entry.size_bytes:,} bytes: it is "
                "truncated or damaged"
            )
        dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
        content, at = file.read_at(0, entry.size_bytes), _HEADER.size
        sizes = np.frombuffer(content, "<i4", sequences, at)
        pointers = np.frombuffer(content, "<i8", sequences, at + 4 * sequences)
        numbers = np.frombuffer(content, "<i8", borders, at + 12 * sequences)
        modes = np.frombuffer(content, "<i1", offset=end)
        bounds = offsets_of(sizes)
        for first in np.flatnonzero((sizes < 0) | (pointers != bounds[:-1] * dtype.itemsize))[:1]:
            raise ValueError(
                f"sequence {first:,} has {sizes[first]:,} tokens and begins at byte "
                f"{pointers[first]:,}, expected {bounds[first] * dtype.itemsize:,}, the end of the "
                "one before it: sequences overlap, leave a gap or aren't in order"
            )
        if bounds[-1] * dtype.itemsize != data.size_bytes:
            raise ValueError(
                f"its sequences end at byte {bounds[-1] * dtype.itemsize:,}, and that file has "
                f"{data.size_bytes:,} bytes"
            )
        for first in np.flatnonzero(modes)[:1]:
            raise ValueError(f"sequence {first:,} has mode {modes[first]}; only text (0) is read")
        if borders and (numbers[0] or (np.diff(numbers) < 0).any() or numbers[-1] != sequences):
            raise ValueError(
                "the borders of its documents don't ascend from 0 to the number of sequences: they "
                f"end at sequence {numbers[-1]:,} of {sequences:,}"
            )
    return TokenFile(
        entry=data,
        dtype=dtype.str,
        tokens=data.size_bytes // dtype.itemsize,
        documents=bounds[numbers] if borders else bounds,  # without borders, each sequence is one
        checksum=crc32c(content),
    )


def find_files(origin: Origin) -> list[Pair]:
    """Return the files of a dataset, sorted by name.

    Raises DatasetNotFoundError, DatasetError or FetchError.
    """
    entries = origin.entries(lambda name: not is_passed_over(name))
    data = [entry for entry in entries if entry.name.endswith((BIN, NPY))]
    if not data:  # files of any name: reading them finds contents that can't be tokens
        data = [entry for entry in entries if not entry.name.endswith(IDX)]
    if not data:
        raise DatasetNotFoundError(
            f"{origin.url}: no file of tokens. Expected .bin or .npy files, or other files of "
            "token ids, directly in this folder."
        )
    left = {entry.name: entry for entry in entries if entry.name.endswith(IDX)}
    pairs: list[Pair] = []
    for entry in data:
        name = entry.name.removesuffix(BIN) + IDX
        idx = left.pop(name, None) if entry.name.endswith(BIN) else None
        if idx is None and origin.selection is not None and entry.name.endswith(BIN):
            idx = origin.entry(name)  # the URL names single files: the listing lacks their .idx
        pairs.append((entry, idx))
    for name in left:
        raise DatasetError(
            f"{origin.url}: {printable(name)} has no data file "
            f"{printable(name.removesuffix(IDX) + BIN)}. Fetch that file too, or remove the .idx "
            "from the folder."
        )
    without = [entry for entry, idx in pairs if idx is None]
    if 0 < len(without) < len(pairs):
        raise DatasetError(
            f"{origin.url}: {len(pairs) - len(without)} of {len(pairs)} files have an .idx, and "
            f"{printable(without[0].name)} has none. Put the files without an .idx into another "
            "folder."
        )
    return pairs


def inspect_token_file(origin: Origin, pair: Pair, *, dtype: str | None) -> TokenFile:
    """Read the layout of a file. dtype: from the user.

    Raises ConfigError (the dtype is missing, or isn't the file's) or DatasetError.
    """
    entry, idx = pair
    with refusing(entry):
        if idx is not None:
            found = read_idx(origin, idx, entry)
        elif entry.name.endswith(NPY):
            found = _read_npy(origin, entry)
        elif dtype is not None:
            found = _flat_file(entry, np.dtype(dtype).newbyteorder("<"), 0)
        else:
            raise ConfigError(
                f"dtype: {printable(entry.name)} doesn't record its dtype. Pass the one that it "
                'was written with, such as dtype="uint16".'
            )
    if dtype is not None and dtype != (name := np.dtype(found.dtype).name):
        source = "its header" if idx is None else printable(idx.name)
        raise ConfigError(
            f"dtype: got {dtype!r}, and {printable(entry.name)} is {name} according to {source}. "
            "Omit dtype=."
        )
    return found


def _flat_file(entry: Entry, dtype: np.dtype[Any], start: int) -> TokenFile:
    """Return the layout of a file of tokens from byte `start` on. Raises ValueError."""
    tokens, rest = divmod(entry.size_bytes - start, dtype.itemsize)
    if rest:
        raise ValueError(
            f"the file has {entry.size_bytes:,} bytes, which isn't a whole number of {dtype.name} "
            "tokens: it is truncated or has another dtype"
        )
    return TokenFile(entry=entry, dtype=dtype.str, start=start, tokens=tokens)


def _read_npy(origin: Origin, entry: Entry) -> TokenFile:
    with open_data_file(origin, entry) as file:
        data = np.frombuffer(file.read_at(0, _NPY_HEAD_BYTES), np.uint8)
    header = accepted(read_npy_header(data, size_bytes=entry.size_bytes))
    dtype = header.codec.dtype
    if len(header.shape) != 1 or dtype.kind not in "iu":
        raise ValueError(
            f"the array is {dtype.name} of shape {header.shape}, and tokens are integers in one "
            'dimension: pass format="npy", or save a flat array'
        )
    return _flat_file(entry, dtype, header.start)


# Shards grow with the dataset, so that a few thousand sidecars suffice. Shards with documents grow
# less, because an open one holds about 50 bytes for each document.
_MANY_SHARDS, _MAX_SHARD_BYTES, _MAX_DOCUMENT_SHARD_BYTES = 2048, 2**30, 2**27
_MAX_PACKED_LENGTH = 2**24


class TokenReader(ChunkReader):
    """Reads ranges of tokens and checks their ids."""

    def __init__(self, notes: TokenNotes, shard: ChunkedShardFacts) -> None:
        """Raises ValueError for facts that contradict each other."""
        self._notes, self._dtype = notes, np.dtype(notes.dtype)
        self._out = np.dtype(getattr(shard.schema[TOKENS], "dtype", "int64"))
        if len(shard.extents) != 1:
            raise ValueError(f"it has {len(shard.extents)} extents, expected 1")
        count, rest = divmod(int(shard.extents.sizes[0]), self._dtype.itemsize)
        if rest or (len(notes.lengths) and int(notes.lengths.sum(dtype=np.int64)) != count):
            raise ValueError("its documents have another number of tokens than its extent")
        limits, vocabulary = np.iinfo(self._dtype), notes.vocabulary
        self._below = vocabulary
        if vocabulary is not None and limits.max < vocabulary and limits.min >= 0:
            self._below = None  # all numbers of the dtype are ids
        self._sequences = ShardSequences(notes, count)
        if self._sequences.count != shard.samples:
            raise ValueError(f"it has {shard.samples:,} sequences, not {self._sequences.count:,}")

    def needs(self, rows: Ints, fields: Sequence[str], crops: Crops) -> list[int]:
        """Return the shard's only extent."""
        return [0] if TOKENS in fields and len(rows) else []

    def needs_parts(self, rows: Ints, fields: Sequence[str], crops: Crops) -> Parts:
        """Return the byte ranges that hold the tokens of these rows."""
        starts, lengths, _ = self._sequences.ranges(rows if TOKENS in fields else rows[:0])
        return self._parts(starts, lengths)

    def _parts(self, starts: Ints, lengths: Ints) -> Parts:
        size = self._dtype.itemsize
        return [0] * len(starts), (starts * size).tolist(), ((starts + lengths) * size).tolist()

    def gather(
        self,
        field: str,
        rows: Ints,
        out: Numbers,
        places: Places,
        *,
        data: ShardData,
        wrong: dict[int, str],
        corners: Ints | None = None,
    ) -> None:
        """Read rows of a field into their slots."""
        if not len(rows):
            return
        if field != TOKENS:
            out[places] = self._sequences.document_values(field, rows, out.shape[1:])
            return
        parts, counts = self._read(rows, data, wrong)
        slots, following = place_numbers(places, len(rows)).tolist(), iter(parts)
        for slot, count in zip(slots, counts, strict=True):
            sequence, at = out[slot], 0
            for part in islice(following, count):
                sequence[at : at + len(part)] = part
                at += len(part)
            sequence[at:] = 0

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read the tokens of samples that differ in length. All other fields have one shape."""
        if TOKENS not in fields:
            return {}
        parts, _ = self._read(rows, data, wrong)
        offsets = offsets_of([len(part) for part in parts])
        values = np.empty(int(offsets[-1]), self._out)
        if parts:
            np.concatenate(parts, out=values, casting="unsafe")
        return {TOKENS: RaggedColumn(values, offsets)}

    def _read(
        self, rows: Ints, data: ShardData, wrong: dict[int, str]
    ) -> tuple[list[Numbers], list[int]]:
        """Return the ranges of tokens of all rows, in the file's dtype, and their number in each
        row. A range with an id outside of the vocabulary, which makes its row bad, is zeros."""
        starts, lengths, several = self._sequences.ranges(rows)
        view = data.view(0, size_bytes=int(lengths.sum()) * self._dtype.itemsize)
        if view is not None:
            tokens, ends = view.view(self._dtype), starts + lengths
            parts = [tokens[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        else:
            read = data.read_parts(*self._parts(starts, lengths))
            parts = [part.view(self._dtype) for part in read]
        counts = [1] * len(rows) if several is None else several.tolist()
        if self._below is not None:
            owners = np.repeat(np.arange(len(rows)), counts).tolist()
            parts = [self._checked(*each, wrong) for each in zip(owners, parts, strict=True)]
        return parts, counts

    def _checked(self, row: int, tokens: Numbers, wrong: dict[int, str]) -> Numbers:
        below = self._below
        if below is None or not (is_wrong := (tokens >= below) | (tokens < 0)).any():
            return tokens
        at = int(is_wrong.argmax())
        has = f"the vocabulary has {below:,} ids: 0 to {below - 1:,}"
        wrong.setdefault(row, f"its token {at:,} is {int(tokens[at]):,}, and {has}")
        return np.zeros_like(tokens)

    def plain(self, field: str, *, data: ShardData) -> StridedRows | None:
        """Return the location of the sequences if they lie at equal distances in a mapped file;
        None otherwise."""
        is_strided = field == TOKENS and self._notes.documents == "across"
        view = data.view(0, size_bytes=0) if is_strided else None
        if view is None:
            return None
        itemsize, cut = self._dtype.itemsize, self._notes.cut
        return StridedRows(
            data=view,
            stride_bytes=cut.stride * itemsize,
            row_bytes=cut.length * itemsize,
            dtype=self._dtype,
            below=self._below,
        )

    def lengths(self, field: str, rows: Ints) -> Ints | None:
        """Return the number of tokens of each sample."""
        assert field == TOKENS, field
        return self._sequences.ranges(rows)[1] if self._notes.documents == "within" else None

    def name(self, row: int) -> str:
        """Return the file, and the range of tokens or the documents."""
        return self._sequences.name(row)


class TokenFormat(ChunkFormat):
    """The format of streams of token ids that are cut into sequences."""

    name = "tokens"
    sampling = ("sample", "stride", "dtype", "documents", "vocabulary")

    def has_default_names(self, origin: Origin) -> bool:
        """Return True: there is one field."""
        return True

    def recognises(self, origin: Origin) -> bool:
        """Return True if the root holds Megatron's files, or flat .bin files whose dtype the user
        gives. Other files don't record what they are."""
        names = [name for name in origin.names().files if name.endswith((BIN, IDX))]
        if not names:
            return False
        # Links that are broken are left to the format that is recognised.
        listed = [name for name in names if name.endswith(IDX)]
        if origin.selection is not None:  # the URL may name the .bin file only
            listed.append(names[0].removesuffix(BIN) + IDX)
        if (idx := next(filter(None, map(origin.entry, listed)), None)) is not None:
            with open_data_file(origin, idx) as file:
                return file.read_at(0, len(MAGIC)) == MAGIC
        return Sampling.of(origin.arrangement).dtype is not None

    def default_fields(self, schema: Schema) -> tuple[str, ...] | None:
        """Return the tokens alone; None (all fields) for packed documents, because a packed
        sequence is meaningless without them."""
        document = schema[DOCUMENT].form if DOCUMENT in schema else None
        is_packed = document is not None and document.dtype == np.int32
        return None if is_packed else (TOKENS,)

    def files(self, origin: Origin) -> DatasetFiles:
        """List the files of tokens and their .idx files."""
        pairs = find_files(origin)
        return DatasetFiles(entries=[each for pair in pairs for each in pair if each], found=pairs)

    def index(self, origin: Origin, files: DatasetFiles, *, workers: int) -> ChunkedDataset:
        """Read headers and .idx files, and return the shards.

        Raises DatasetNotFoundError if no file holds a sequence.
        """
        pairs = files.found
        sampling = Sampling.of(origin.arrangement)
        has_idx = pairs[0][1] is not None
        documents = _document_mode(sampling, has_idx=has_idx)
        cut = _cut(sampling, documents)
        schema, dtype = _schema(origin, cut, documents, has_idx=has_idx)
        total = sum(entry.size_bytes for entry, _ in pairs)
        most = _MAX_DOCUMENT_SHARD_BYTES if has_idx else _MAX_SHARD_BYTES
        target = min(most, max(PART_BYTES, total // _MANY_SHARDS))
        plan = TokenNotes(cut=cut, documents=documents, vocabulary=sampling.vocabulary)
        inspect = partial(inspect_token_file, origin, dtype=sampling.dtype)
        shards, first, left = list[ChunkedShard](), 0, 0
        short: dict[bytes, int] = {}  # files with tokens that don't fill one sequence
        for file in ordered(inspect, pairs, workers=workers, ahead=workers + 2, name="list"):
            _check_dtype(file, dtype, sampling.vocabulary)
            shards += _shards(file, plan, target=target, first_document=first)
            first += 0 if file.documents is None else len(file.documents) - 1
            if documents == "across":  # tokens between sequences (stride > length) aren't left over
                count = sequence_count(file.tokens, cut)
                left += file.tokens - ((count - 1) * cut.stride + cut.length if count else 0)
                short[file.entry.name] = int(file.tokens > 0 and not count)
        if not shards:
            raise DatasetNotFoundError(
                f"{origin.url}: its {len(pairs):,} files have {left:,} tokens, and none of them "
                f"fills one sequence of {cut.length:,}. Pass a smaller sample=."
            )
        if left:
            log.info(
                "%s: %d tokens at the ends of %d files are left out, because they don't fill a "
                "sequence of %d",
                origin.url,
                left,
                len(pairs),
                cut.length,
            )
        why = f"a file of less than one sequence ({cut.length:,})"
        return ChunkedDataset(schema=schema, shards=shards, unnamed=left_out_for(why, short))

    def reader(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard; its samples aren't read."""
        return TokenReader(TokenNotes.from_bytes(shard.notes), shard)


def _shards(
    file: TokenFile, plan: TokenNotes, *, target: int, first_document: int
) -> Iterator[ChunkedShard]:
    """Yield the shards of a file. target: their bytes. first_document: its number in the
    dataset."""
    name, bounds = printable(file.entry.name), file.documents
    itemsize = np.dtype(file.dtype).itemsize
    tokens = max(1, target // itemsize)
    parts = stream_parts(file.tokens, plan.cut, target=tokens)
    if plan.documents != "across" and bounds is not None:
        parts = document_parts(bounds, plan.cut, target=tokens)
    plan = replace(plan, dtype=file.dtype, name=name)
    for first, end in parts:
        notes = replace(plan, token=first, first_document=first_document)
        if bounds is not None:
            before, skip, lengths = slice_documents(bounds, first, end)
            number = first_document + before
            notes = replace(notes, first_document=number, skip=skip, lengths=lengths)
        samples = ShardSequences(notes, end - first).count
        if not samples:  # all its documents are empty
            continue
        note = notes.to_bytes()
        start, size = file.start + first * itemsize, (end - first) * itemsize
        identity = [name, file.entry.size_bytes, file.checksum, start, size]
        yield ChunkedShard.of(
            [(file.entry, start, size, 0)],
            samples=samples,
            checksum=crc32c(note, crc32c(json.dumps(identity).encode())),
            note=note,
        )


def _document_mode(sampling: Sampling, *, has_idx: bool) -> DocumentMode:
    """Return how sequences relate to documents.

    By default they run across documents; if the documents are known and no length is given, each
    document is one sample.
    """
    mode = sampling.documents
    if mode is None:
        mode = "within" if has_idx and sampling.window(TOKENS) is None else "across"
    if mode != "across" and not has_idx:
        raise ConfigError(
            f'documents: got "{mode}", and flat files of tokens don\'t record where documents end. '
            "Provide a Megatron .idx file for each .bin file, or omit documents= to cut sequences "
            "across documents."
        )
    return mode


def _cut(sampling: Sampling, documents: DocumentMode) -> Cut:
    window, step = sampling.window(TOKENS), sampling.step(TOKENS)
    others = {*sampling.sample, *sampling.stride} - {ALL_FIELDS, TOKENS}
    if others:
        raise ConfigError(f'sample: got {sorted(others)}, expected the field "{TOKENS}".')
    if window is None:
        if documents == "within":
            return Cut(UNCUT, UNCUT)
        raise ConfigError(
            f'sample: documents="{documents}" needs the length of a sequence. Pass sample=(2048,), '
            "for example."
        )
    if len(window) != 1 or window[0] is None or (step is not None and len(step) != 1):
        raise ConfigError(
            f"sample: got {window}, stride {step}; expected one length for each, such as (2048,)."
        )
    length = window[0]
    stride = length if step is None or step[0] is None else step[0]
    if documents != "across" and stride > length:
        raise ConfigError(
            f"stride: got {stride:,}, and sequences have {length:,} tokens: documents would lose "
            f'the tokens between them. Expected at most {length:,} with documents="{documents}".'
        )
    most = _MAX_PACKED_LENGTH if documents == "pack" else UNCUT - 1
    if length > most:
        raise ConfigError(f"sample: got a length of {length:,}, expected at most {most:,}.")
    return Cut(length, stride)


def _schema(
    origin: Origin, cut: Cut, documents: DocumentMode, *, has_idx: bool
) -> tuple[Schema, str]:
    """Return the fields, and the dtype of delivered tokens, which the user may choose."""
    given = origin.arrangement.schema
    form = given.get(TOKENS, Tokens()).completed("int64", (None,)).form
    if set(given) - {TOKENS} or form is None or form.dtype.kind not in "iu":
        raise ConfigError(
            f"schema: got {given}, expected only the type of the tokens, which are integers: "
            f'{{"{TOKENS}": Tokens("int32")}}.'
        )
    if origin.arrangement.places or origin.arrangement.manifest is not None:
        raise ConfigError(f"{origin.url}: tokens take no manifest= and no paths in fields=.")
    dtype = form.dtype.name
    if documents == "within":
        number = Value("int64")
        return Schema({TOKENS: Tokens(dtype), DOCUMENT: number, POSITION: number}), dtype
    names = {TOKENS: dtype}
    if has_idx:
        names |= {DOCUMENT: "int32" if documents == "pack" else "int64", POSITION: "int64"}
    return Schema({name: Array(each, (cut.length,)) for name, each in names.items()}), dtype


def _check_dtype(file: TokenFile, wanted: str, vocabulary: int | None) -> None:
    """Raise ConfigError if the dtype of delivered tokens can't hold all ids of a file."""
    stored = np.dtype(file.dtype).newbyteorder("=")
    fits = vocabulary is not None and vocabulary - 1 <= np.iinfo(wanted).max
    if stored == np.uint64 or not (fits or np.can_cast(stored, wanted, "safe")):
        raise ConfigError(
            f'schema["{TOKENS}"]: {wanted} can\'t hold all values of {stored}, the dtype of '
            f"{printable(file.entry.name)}. Write the file as int64 or smaller; or pass a wider "
            f"dtype, or a vocabulary= whose ids fit into {wanted} (not for uint64)."
        )


FORMAT = TokenFormat()
