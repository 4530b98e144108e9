"""Recognise datasets of token ids, and read sequences of tokens from a shard.

The files are flat, or Megatron's .bin files with an .idx file that gives their documents. A shard
is one extent of a file, and it is cut into sequences by arithmetic.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fieldtypes import RaggedColumn
from penstock.readers.formats.array_windows import place_numbers
from penstock.readers.formats.chunked import ChunkedDataset, ChunkFormat, ChunkReader
from penstock.readers.formats.format import DatasetFiles
from penstock.readers.formats.open_shard import StridedRows
from penstock.readers.formats.tokens.token_sequences import (
    DOCUMENT,
    TOKENS,
    TokenNotes,
    cut_documents,
    number_ranges,
    pack_pieces,
    sequence_count,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, Schema
    from penstock.readers.formats.chunked import ChunkedShardFacts, Crops, Parts, ShardData
    from penstock.readers.formats.open_shard import Places
    from penstock.readers.formats.tokens.token_sequences import DocumentPieces
    from penstock.readers.origin import Origin

    Ints = NDArray[np.int64]


class TokenReader(ChunkReader):
    """The base of the readers of one mode of documents.

    It reads ranges of tokens and checks their ids. A sample consists of one range, or of several
    with `_ranges_of`.
    """

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
        if (samples := self._open(count)) != shard.samples:
            raise ValueError(f"it has {shard.samples:,} sequences, expected {samples:,}")

    @abstractmethod
    def _open(self, tokens: int) -> int:
        """Prepare for a shard of this many tokens, and return its number of samples."""

    @abstractmethod
    def _ranges(self, rows: Ints) -> tuple[Ints, Ints, Ints | None]:
        """Return the first tokens and the lengths of the ranges that some rows consist of, row by
        row, and the number of ranges of each row; None if each has one."""

    @abstractmethod
    def _runs(self, rows: Ints, length: int = 0) -> tuple[Ints, Ints, Ints]:
        """Return the runs of tokens of one document that some rows consist of, row by row: the
        number of the document, -1 for padding; the position of the first token; the tokens.

        length: of a sequence, if all have one.
        """

    def needs(self, rows: Ints, fields: Sequence[str], crops: Crops) -> list[int]:
        """Return the shard's only extent."""
        del crops
        return [0] if TOKENS in fields and len(rows) else []

    def needs_parts(self, rows: Ints, fields: Sequence[str], crops: Crops) -> Parts:
        """Return the byte ranges that hold the tokens of these rows."""
        del crops
        if TOKENS not in fields:
            return [], [], []
        starts, lengths, _ = self._ranges(rows)
        size = self._dtype.itemsize
        return [0] * len(starts), (starts * size).tolist(), ((starts + lengths) * size).tolist()

    def gather(
        self,
        field: str,
        rows: Ints,
        out: NDArray[Any],
        places: Places,
        *,
        data: ShardData,
        wrong: dict[int, str],
        corners: Ints | None = None,
    ) -> None:
        """Read rows of a field into their slots."""
        del corners
        if not len(rows):
            return
        if field != TOKENS:
            out[places] = self._document_values(field, rows, out.shape[1:])
            return
        starts, lengths, counts = self._ranges(rows)
        parts = self._read(data, starts, lengths)
        slots, checks = place_numbers(places, len(rows)).tolist(), self._below is not None
        if counts is None:
            for row, (slot, part) in enumerate(zip(slots, parts, strict=True)):
                out[slot] = self._checked(row, part, wrong) if checks else part
            return
        following = iter(parts)
        for row, (slot, count) in enumerate(zip(slots, counts.tolist(), strict=True)):
            sequence, at = out[slot], 0
            for part in islice(following, count):
                end = at + len(part)
                sequence[at:end] = self._checked(row, part, wrong) if checks else part
                at = end
            sequence[at:] = 0

    def _document_values(self, field: str, rows: Ints, shape: tuple[int, ...]) -> Ints:
        """Return the number of the document of each token, or each token's position in it; if the
        shape is (), those of each row's first token."""
        numbers, positions, lengths = self._runs(rows, *shape)
        if not shape:
            return numbers if field == DOCUMENT else positions
        if field == DOCUMENT:
            return np.repeat(numbers, lengths).reshape(-1, *shape)
        begins = np.cumsum(lengths) - lengths
        values = np.repeat(positions - begins, lengths)
        values += np.arange(len(values))
        padding = numbers < 0
        for at, count in zip(begins[padding].tolist(), lengths[padding].tolist(), strict=True):
            values[at : at + count] = 0
        return values.reshape(-1, *shape)

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Return no columns: the samples of all fields have one shape."""
        del rows, fields, data, wrong
        return {}

    def _read(self, data: ShardData, starts: Ints, lengths: Ints) -> list[NDArray[Any]]:
        """Read ranges of tokens; each is an array of the file's dtype."""
        size = self._dtype.itemsize
        view = data.view(0, size_bytes=int(lengths.sum()) * size)
        ends = starts + lengths
        if view is not None:
            tokens = view.view(self._dtype)
            return [tokens[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        parts = data.read_parts([0] * len(starts), (starts * size).tolist(), (ends * size).tolist())
        return [part.view(self._dtype) for part in parts]

    def _checked(self, row: int, tokens: NDArray[Any], wrong: dict[int, str]) -> Any:
        """Return the tokens, or 0 if one is outside of the vocabulary, which makes the row bad."""
        if self._below is None:
            return tokens
        is_wrong = (tokens >= self._below) | (tokens < 0)
        if not is_wrong.any():
            return tokens
        at = int(is_wrong.argmax())
        wrong.setdefault(
            row,
            f"its token {at:,} is {int(tokens[at]):,}, and the vocabulary has {self._below:,} ids: "
            f"0 to {self._below - 1:,}",
        )
        return 0


class StreamReader(TokenReader):
    """Reads sequences that run across documents, one every stride."""

    def _open(self, tokens: int) -> int:
        lengths = self._notes.lengths
        self._begins: Ints = np.cumsum(lengths, dtype=np.int64) - lengths
        return sequence_count(tokens, self._notes.cut)

    def _ranges(self, rows: Ints) -> tuple[Ints, Ints, Ints | None]:
        cut = self._notes.cut
        return rows * cut.stride, np.full(len(rows), cut.length, np.int64), None

    def name(self, row: int) -> str:
        """Return the file and the range of tokens."""
        start = self._notes.token + row * self._notes.cut.stride
        return f"{self._notes.name}[{start}:{start + self._notes.cut.length}]"

    def plain(self, field: str, *, data: ShardData) -> StridedRows | None:
        """Return the location of the sequences if the file is mapped; None otherwise."""
        view = data.view(0, size_bytes=0) if field == TOKENS else None
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

    def _runs(self, rows: Ints, length: int = 0) -> tuple[Ints, Ints, Ints]:
        notes, begins, starts = self._notes, self._begins, rows * self._notes.cut.stride
        first = np.searchsorted(begins, starts, side="right") - 1
        counts = np.searchsorted(begins, starts + length, side="left") - first
        numbers = number_ranges(first, counts)  # an empty document has no tokens
        low = np.maximum(begins[numbers], np.repeat(starts, counts))
        high = np.minimum(
            begins[numbers] + notes.lengths[numbers].astype(np.int64),
            np.repeat(starts + length, counts),
        )
        positions = low - begins[numbers] + np.where(numbers == 0, notes.skip, 0)
        return numbers + notes.first_document, positions, high - low


class PieceReader(TokenReader):
    """Reads pieces of documents as samples of different lengths."""

    def _open(self, tokens: int) -> int:
        del tokens
        self._pieces = cut_documents(self._notes.lengths, self._notes.cut)
        return len(self._pieces)

    def _ranges(self, rows: Ints) -> tuple[Ints, Ints, Ints | None]:
        return self._pieces.starts[rows], self._pieces.lengths[rows], None

    def lengths(self, field: str, rows: Ints) -> Ints:
        """Return the number of tokens of each piece."""
        assert field == TOKENS, field
        lengths: Ints = self._pieces.lengths[rows]
        return lengths

    def name(self, row: int) -> str:
        """Return the file, the document and the range of its tokens."""
        return _piece_name(self._notes, self._pieces, row)

    def _runs(self, rows: Ints, length: int = 0) -> tuple[Ints, Ints, Ints]:
        del length
        documents = self._pieces.documents[rows]
        positions = self._pieces.offsets[rows] + np.where(documents == 0, self._notes.skip, 0)
        return documents + self._notes.first_document, positions, self._pieces.lengths[rows]

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read the tokens of pieces."""
        if TOKENS not in fields:
            return {}
        starts, lengths, _ = self._ranges(rows)
        parts = self._read(data, starts, lengths)
        for row, part in enumerate(parts):
            if self._checked(row, part, wrong) is not part:
                parts[row] = part[:0]
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        values = np.empty(int(offsets[-1]), self._out)
        for part, (a, b) in zip(parts, pairwise(offsets.tolist()), strict=True):
            values[a:b] = part
        return {TOKENS: RaggedColumn(values, offsets)}


class PackedReader(TokenReader):
    """Reads sequences of one length that pieces are packed into, padded with 0."""

    def _open(self, tokens: int) -> int:
        del tokens
        self._pieces = cut_documents(self._notes.lengths, self._notes.cut)
        self._packing = pack_pieces(self._pieces.lengths, room=self._notes.cut.length)
        return len(self._packing)

    def _ranges(self, rows: Ints) -> tuple[Ints, Ints, Ints | None]:
        bounds = self._packing.bounds
        counts = bounds[rows + 1] - bounds[rows]
        members = self._packing.pieces[number_ranges(bounds[rows], counts)]
        return self._pieces.starts[members], self._pieces.lengths[members], counts

    def name(self, row: int) -> str:
        """Return the file and the documents."""
        a, b = self._packing.bounds[row : row + 2].tolist()
        more = f" and {b - a - 1} more" if b - a > 1 else ""
        return _piece_name(self._notes, self._pieces, int(self._packing.pieces[a])) + more

    def _runs(self, rows: Ints, length: int = 0) -> tuple[Ints, Ints, Ints]:
        _, lengths, counts = self._ranges(rows)
        assert counts is not None
        ends = np.cumsum(counts)
        used = np.add.reduceat(lengths, ends - counts)
        numbers = number_ranges(np.zeros_like(counts), counts + 1)
        numbers[ends + np.arange(len(ends))] = -1  # the padding of each sequence
        return numbers, np.zeros_like(numbers), np.insert(lengths, ends, length - used)


def _piece_name(notes: TokenNotes, pieces: DocumentPieces, piece: int) -> str:
    """Return the file, the document and the range of a piece's tokens."""
    document, length = int(pieces.documents[piece]), int(pieces.lengths[piece])
    start = int(pieces.offsets[piece]) + (0 if document else notes.skip)
    return f"{notes.name}: document {notes.first_document + document}[{start}:{start + length}]"


_READERS: Mapping[str, type[TokenReader]] = {
    "across": StreamReader,
    "within": PieceReader,
    "pack": PackedReader,
}


class TokenFormat(ChunkFormat):
    """The format of streams of token ids that are cut into sequences."""

    name = "tokens"
    sampling = ("sample", "stride", "dtype", "documents", "vocabulary")

    def has_default_names(self, origin: Origin) -> bool:
        """Return True: there is one field."""
        del origin
        return True

    def recognises(self, origin: Origin) -> bool:
        """Return True if the root holds Megatron's files, or flat .bin files whose dtype the user
        gives. Other files don't record what they are."""
        entries = origin.top(lambda name: name.endswith((b".bin", b".idx"))).entries
        if not entries:
            return False
        from penstock.readers.formats.dataset_arguments import Sampling
        from penstock.readers.formats.tokens.token_files import has_magic

        idx = next((entry for entry in entries if entry.name.endswith(b".idx")), None)
        if idx is None and origin.selection is not None:  # the URL names the .bin file only
            idx = origin.entry(entries[0].name.removesuffix(b".bin") + b".idx")
        if idx is not None:
            return has_magic(origin, idx)
        return Sampling.of(origin.arrangement).dtype is not None

    def default_fields(self, schema: Schema) -> tuple[str, ...] | None:
        """Return the tokens alone; None (all fields) for packed documents, because a packed
        sequence is meaningless without them."""
        document = schema[DOCUMENT].form if DOCUMENT in schema else None
        is_packed = document is not None and document.dtype == np.int32
        return None if is_packed else (TOKENS,)

    def files(self, origin: Origin) -> DatasetFiles:
        """List the files of tokens and their .idx files."""
        from penstock.readers.formats.tokens.token_files import find_files

        pairs = find_files(origin)
        entries = [each for pair in pairs for each in (pair.data, pair.idx) if each]
        return DatasetFiles(entries=entries, found=pairs)

    def index(self, origin: Origin, files: DatasetFiles, *, workers: int) -> ChunkedDataset:
        """Read headers and .idx files, and return the shards.

        Raises DatasetNotFoundError if no file holds a sequence.
        """
        from penstock.readers.formats.tokens.token_listing import index_tokens

        return index_tokens(origin, files.found, workers=workers)

    def reader(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard; its samples aren't read."""
        notes = TokenNotes.from_bytes(shard.notes)
        return _READERS[notes.documents](notes, shard)


FORMAT = TokenFormat()
