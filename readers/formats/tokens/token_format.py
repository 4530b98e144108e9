"""Recognise datasets of token ids, and read sequences of tokens from a shard.

The files are flat, or Megatron's .bin files with an .idx file that gives their documents. A shard
is one extent of a file, and it is cut into sequences by arithmetic.
"""

from __future__ import annotations

from functools import cached_property
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fieldtypes import Array, RaggedColumn
from penstock.readers.formats.array_windows import place_numbers
from penstock.readers.formats.chunked import ChunkedDataset, ChunkFormat, ChunkReader, DatasetFiles
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
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, ColumnCrop, Schema
    from penstock.readers.formats.chunked import ChunkedShardFacts, ShardData
    from penstock.readers.formats.open_shard import Places
    from penstock.readers.origin import Origin

    Ints = NDArray[np.int64]


class _TokenReader(ChunkReader):
    """The common part of the readers: it reads ranges of tokens and checks their ids."""

    def __init__(self, notes: TokenNotes, shard: ChunkedShardFacts) -> None:
        self._notes = notes
        self._dtype = np.dtype(notes.dtype)
        if len(shard.extents) != 1:
            raise ValueError(f"it has {len(shard.extents)} extents, expected 1")
        count, rest = divmod(int(shard.extents.sizes[0]), self._dtype.itemsize)
        if rest or (len(notes.lengths) and int(notes.lengths.sum(dtype=np.int64)) != count):
            raise ValueError("its documents have another number of tokens than its extent")
        self._count = count
        self._out = np.dtype(getattr(shard.schema[TOKENS], "dtype", "int64"))
        limits = np.iinfo(self._dtype)
        vocabulary = notes.vocabulary
        self._is_checked = vocabulary is not None and (limits.max >= vocabulary or limits.min < 0)

    def needs(
        self, rows: Ints, fields: Sequence[str], crops: Mapping[str, ColumnCrop]
    ) -> list[int]:
        """Return the shard's only extent."""
        del crops
        return [0] if TOKENS in fields and len(rows) else []

    def needs_parts(
        self, rows: Ints, fields: Sequence[str], crops: Mapping[str, ColumnCrop]
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the byte ranges that hold the tokens of these rows."""
        del crops
        if TOKENS not in fields or not len(rows):
            return [], [], []
        starts, lengths = self._token_ranges(rows)
        size = self._dtype.itemsize
        return [0] * len(starts), (starts * size).tolist(), ((starts + lengths) * size).tolist()

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Return no columns: the samples of all fields have one shape."""
        del rows, fields, data, wrong
        return {}

    def _token_ranges(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the first tokens and the lengths of the ranges that some rows consist of."""
        raise NotImplementedError

    def _parts(self, data: ShardData, starts: list[int], ends: list[int]) -> list[NDArray[Any]]:
        """Read tokens [start, end) of the shard; each range is an array of the file's dtype."""
        itemsize = self._dtype.itemsize
        view = data.view(0, size_bytes=(sum(ends) - sum(starts)) * itemsize)
        if view is not None:
            tokens = view.view(self._dtype)
            return [tokens[a:b] for a, b in zip(starts, ends, strict=True)]
        parts = data.read_parts(
            [0] * len(starts), [a * itemsize for a in starts], [b * itemsize for b in ends]
        )
        return [part.view(self._dtype) for part in parts]

    def _reason(self, tokens: NDArray[Any]) -> str | None:
        """Return why a sample is bad: it has an id outside of the vocabulary. None if it is
        good."""
        vocabulary = self._notes.vocabulary
        assert vocabulary is not None
        wrong = (tokens >= vocabulary) | (tokens < 0)
        if not wrong.any():
            return None
        at = int(wrong.argmax())
        return (
            f"its token {at:,} is {int(tokens[at]):,}, and the vocabulary has {vocabulary:,} ids: "
            f"0 to {vocabulary - 1:,}"
        )


class _StreamReader(_TokenReader):
    """Reads sequences that run across documents, one every stride."""

    def __init__(self, notes: TokenNotes, shard: ChunkedShardFacts) -> None:
        super().__init__(notes, shard)
        if sequence_count(self._count, notes.cut) != shard.samples:
            raise ValueError("its number of sequences doesn't follow from its number of tokens")

    def _token_ranges(self, rows: Ints) -> tuple[Ints, Ints]:
        cut = self._notes.cut
        return rows * cut.stride, np.full(len(rows), cut.length, np.int64)

    def name(self, row: int) -> str:
        """Return the file and the range of tokens."""
        start = self._notes.token + row * self._notes.cut.stride
        return f"{self._notes.name}[{start}:{start + self._notes.cut.length}]"

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
        """Read rows of a field, or parts of them, into their slots."""
        starts = rows * self._notes.cut.stride
        if corners is not None:
            starts = starts + corners[:, 0]
        length = out.shape[1]
        if field != TOKENS:
            out[places] = self._document_values(field, starts, length)
            return
        parts = self._parts(data, starts.tolist(), (starts + length).tolist())
        slots = place_numbers(places, len(rows)).tolist()
        for row, (slot, part) in enumerate(zip(slots, parts, strict=True)):
            out[slot] = part
            if self._is_checked and (reason := self._reason(part)):
                wrong[row] = reason
                out[slot] = 0

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
            below=self._notes.vocabulary if self._is_checked else None,
        )

    @cached_property
    def _begins(self) -> Ints:
        """The first token of each document, counted from the shard's first token, int64."""
        begins: Ints = np.cumsum(self._notes.lengths, dtype=np.int64) - self._notes.lengths
        return begins

    def _document_values(self, field: str, starts: Ints, length: int) -> Ints:
        """Return for each token the number of its document in the dataset, or its position in the
        document."""
        begins = self._begins
        first = np.searchsorted(begins, starts, side="right") - 1
        counts = np.searchsorted(begins, starts + length, side="left") - first
        # The documents of each sequence, and how many tokens of each it has (0 of an empty one).
        numbers = number_ranges(first, counts)
        low = np.maximum(begins[numbers], np.repeat(starts, counts))
        ends = begins[numbers] + self._notes.lengths[numbers].astype(np.int64)
        lengths = np.minimum(ends, np.repeat(starts + length, counts)) - low
        if field == DOCUMENT:
            return np.repeat(numbers + self._notes.first_document, lengths).reshape(-1, length)
        firsts = begins[numbers] - np.where(numbers == 0, self._notes.skip, 0)
        tokens = starts[:, None] + np.arange(length)
        positions: Ints = tokens - np.repeat(firsts, lengths).reshape(-1, length)
        return positions


class _CutReader(_TokenReader):
    """The common part of the readers of documents that are cut into pieces."""

    def __init__(self, notes: TokenNotes, shard: ChunkedShardFacts) -> None:
        super().__init__(notes, shard)
        self._pieces = cut_documents(notes.lengths, notes.cut)

    def _piece_name(self, piece: int) -> str:
        pieces, notes = self._pieces, self._notes
        document, length = int(pieces.documents[piece]), int(pieces.lengths[piece])
        start = int(pieces.offsets[piece]) + (0 if document else notes.skip)
        return f"{notes.name}: document {notes.first_document + document}[{start}:{start + length}]"

    def _read_pieces(self, numbers: Ints, data: ShardData) -> list[NDArray[Any]]:
        starts = self._pieces.starts[numbers]
        return self._parts(data, starts.tolist(), (starts + self._pieces.lengths[numbers]).tolist())


class _PieceReader(_CutReader):
    """Reads pieces of documents as samples of different lengths."""

    def __init__(self, notes: TokenNotes, shard: ChunkedShardFacts) -> None:
        super().__init__(notes, shard)
        if len(self._pieces) != shard.samples:
            raise ValueError("its number of pieces doesn't follow from its documents")

    def _token_ranges(self, rows: Ints) -> tuple[Ints, Ints]:
        return self._pieces.starts[rows], self._pieces.lengths[rows]

    def lengths(self, field: str, rows: Ints) -> Ints:
        """Return the number of tokens of each piece."""
        assert field == TOKENS, field
        lengths: Ints = self._pieces.lengths[rows]
        return lengths

    def name(self, row: int) -> str:
        """Return the file, the document and the range of its tokens."""
        return self._piece_name(row)

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
        """Return for each piece the number of its document in the dataset, or its position in the
        document."""
        del data, wrong, corners
        documents = self._pieces.documents[rows]
        if field == DOCUMENT:
            out[places] = documents + self._notes.first_document
            return
        out[places] = self._pieces.offsets[rows] + np.where(documents == 0, self._notes.skip, 0)

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read the tokens of pieces."""
        if TOKENS not in fields:
            return {}
        parts = self._read_pieces(rows, data)
        if self._is_checked:
            for row, part in enumerate(parts):
                if reason := self._reason(part):
                    wrong[row] = reason
                    parts[row] = part[:0]
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        values = np.empty(int(offsets[-1]), self._out)
        for part, (a, b) in zip(parts, pairwise(offsets.tolist()), strict=True):
            values[a:b] = part
        return {TOKENS: RaggedColumn(values, offsets)}


class _PackedReader(_CutReader):
    """Reads sequences of one length that pieces are packed into, padded with 0."""

    def __init__(self, notes: TokenNotes, shard: ChunkedShardFacts) -> None:
        super().__init__(notes, shard)
        self._packing = pack_pieces(self._pieces.lengths, room=notes.cut.length)
        if len(self._packing) != shard.samples:
            raise ValueError("its number of sequences doesn't follow from its documents")

    def _members(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the pieces of some sequences, sequence by sequence, and the number of pieces of
        each."""
        bounds = self._packing.bounds
        counts = bounds[rows + 1] - bounds[rows]
        return self._packing.pieces[number_ranges(bounds[rows], counts)], counts

    def _token_ranges(self, rows: Ints) -> tuple[Ints, Ints]:
        members, _ = self._members(rows)
        return self._pieces.starts[members], self._pieces.lengths[members]

    def name(self, row: int) -> str:
        """Return the file and the documents."""
        a, b = self._packing.bounds[row : row + 2].tolist()
        first, *others = self._packing.pieces[a:b].tolist()
        more = f" and {len(others)} more" if others else ""
        return f"{self._piece_name(first)}{more}"

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
        """Fill sequences with their tokens, with the numbers of their documents in the sequence (-1
        for padding), or with positions in these documents."""
        del corners
        if not len(rows):
            return
        members, counts = self._members(rows)
        lengths = self._pieces.lengths[members]
        if field != TOKENS:
            out[places] = _piece_values(field, lengths, counts, out.shape[1])
            return
        slots = place_numbers(places, len(rows)).tolist()
        parts = iter(self._read_pieces(members, data))
        for row, (slot, count) in enumerate(zip(slots, counts.tolist(), strict=True)):
            sequence, at = out[slot], 0
            for part in islice(parts, count):
                sequence[at : at + len(part)] = part
                at += len(part)
                if self._is_checked and (reason := self._reason(part)):
                    wrong.setdefault(row, reason)
            sequence[at:] = 0


def _piece_values(field: str, lengths: Ints, counts: Ints, room: int) -> Ints:
    """Return for each token of packed sequences the number of its piece in the sequence (-1 for
    padding), or its position in the piece.

    lengths: tokens of the pieces, sequence by sequence. counts: pieces of each sequence. room:
    length of a sequence.
    """
    ends = np.cumsum(counts)
    used = np.add.reduceat(lengths, ends - counts)
    # The padding of a sequence counts as one more piece.
    padded = np.insert(lengths, ends, room - used)
    begins = np.cumsum(padded) - padded
    paddings = ends + np.arange(len(ends))
    if field == DOCUMENT:
        numbers = number_ranges(np.zeros_like(counts), counts + 1)
        numbers[paddings] = -1
        return np.repeat(numbers, padded).reshape(-1, room)
    positions = np.arange(len(counts) * room) - np.repeat(begins, padded)
    is_token = np.arange(room) < used[:, None]
    return np.where(is_token, positions.reshape(-1, room), 0)


_READERS: Mapping[str, Callable[[TokenNotes, ChunkedShardFacts], ChunkReader]] = {
    "across": _StreamReader,
    "within": _PieceReader,
    "pack": _PackedReader,
}


class TokenFormat(ChunkFormat):
    """The format of streams of token ids that are cut into sequences."""

    name = "tokens"

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
        document = schema.get(DOCUMENT)
        is_packed = isinstance(document, Array) and document.dtype == "int32"
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
        from penstock.readers.formats.tokens.token_listing import TokenListing

        return TokenListing(origin, files.found).dataset(workers=workers)

    def reader(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard; its samples aren't read."""
        notes = TokenNotes.from_bytes(shard.notes)
        return _READERS[notes.documents](notes, shard)


FORMAT = TokenFormat()
