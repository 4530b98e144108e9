"""Recognise datasets of token ids, and read sequences of tokens out of a shard.

Files are flat, or Megatron's .bin with an .idx that gives their documents. A shard's bytes are one
extent, its cut is arithmetic.
"""

from __future__ import annotations

from functools import cached_property
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.cache import CorruptShardError
from penstock.readers.fields import RaggedColumn
from penstock.readers.formats.chunked import ChunkFormat
from penstock.readers.formats.open_shard import StridedRows
from penstock.readers.formats.tokens.token_sequences import (
    cut_documents,
    number_ranges,
    pack_pieces,
    sequence_count,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields import Column, ColumnCrop, Schema
    from penstock.readers.formats.chunked import ChunkedShardFacts, ChunkReader, ShardData
    from penstock.readers.formats.format import Indexing
    from penstock.readers.formats.open_shard import Places
    from penstock.readers.formats.tokens.token_sequences import TokenNotes
    from penstock.readers.origin import Origin

    Ints = NDArray[np.int64]

_TOKENS, _DOCUMENT = "tokens", "document"


def token_reader(notes: TokenNotes, shard: ChunkedShardFacts) -> ChunkReader:
    """The reader of a shard. Raises ValueError for notes that don't fit it."""
    if notes.documents == "across":
        return _StreamReader(notes, shard)
    return (
        _PieceReader(notes, shard) if notes.documents == "within" else _PackedReader(notes, shard)
    )


class _TokenReader:
    """What all have in common: where tokens lie, and which ids can be."""

    def __init__(self, notes: TokenNotes, shard: ChunkedShardFacts) -> None:
        self._notes = notes
        self._dtype = np.dtype(notes.dtype)
        if len(shard.extents) != 1:
            raise ValueError(f"{len(shard.extents)} extents, wanted 1")
        count, rest = divmod(int(shard.extents.sizes[0]), self._dtype.itemsize)
        if rest or (len(notes.lengths) and int(notes.lengths.sum(dtype=np.int64)) != count):
            raise ValueError("its documents don't hold its tokens")
        self._count = count
        self._out = np.dtype(getattr(shard.schema[_TOKENS], "dtype", "int64"))
        most = np.iinfo(self._dtype)
        vocabulary = notes.vocabulary
        self._is_checked = vocabulary is not None and (most.max >= vocabulary or most.min < 0)

    def needs(
        self, rows: Ints, fields: Sequence[str], crops: Mapping[str, ColumnCrop]
    ) -> list[int]:
        """The shard's only extent."""
        del crops
        return [0] if _TOKENS in fields and len(rows) else []

    def needs_parts(
        self, rows: Ints, fields: Sequence[str], crops: Mapping[str, ColumnCrop]
    ) -> tuple[list[int], list[int], list[int]]:
        """Where the tokens of these rows lie."""
        del crops
        if _TOKENS not in fields or not len(rows):
            return [], [], []
        starts, lengths = self._wanted(rows)
        size = self._dtype.itemsize
        return [0] * len(starts), (starts * size).tolist(), ((starts + lengths) * size).tolist()

    def _wanted(self, rows: Ints) -> tuple[Ints, Ints]:
        """First tokens and lengths of what some rows are made of."""
        raise NotImplementedError

    def _parts(self, data: ShardData, starts: list[int], ends: list[int]) -> list[NDArray[Any]]:
        """Tokens [start, end) of the shard, each an array in the file's dtype."""
        itemsize = self._dtype.itemsize
        touched = (sum(ends) - sum(starts)) * itemsize
        view = data.view(0, size_bytes=touched)
        if view is not None:
            tokens = view.view(self._dtype)
            return [tokens[a:b] for a, b in zip(starts, ends, strict=True)]
        found = data.read_parts(
            [0] * len(starts), [a * itemsize for a in starts], [b * itemsize for b in ends]
        )
        return [each.view(self._dtype) for each in found]

    def _judge(self, tokens: NDArray[Any]) -> str | None:
        """Why a sample is bad: an id that the vocabulary hasn't."""
        vocabulary = self._notes.vocabulary
        assert vocabulary is not None
        wrong = (tokens >= vocabulary) | (tokens < 0)
        if not wrong.any():
            return None
        at = int(wrong.argmax())
        return (
            f"its token {at:,} is {int(tokens[at]):,}, and the vocabulary has {vocabulary:,}: ids "
            f"are 0 to {vocabulary - 1:,}"
        )


class _StreamReader(_TokenReader):
    """Sequences across documents, one every stride."""

    def __init__(self, notes: TokenNotes, shard: ChunkedShardFacts) -> None:
        super().__init__(notes, shard)
        if sequence_count(self._count, notes.cut) != shard.samples:
            raise ValueError("its sequences aren't those of its tokens")

    def _wanted(self, rows: Ints) -> tuple[Ints, Ints]:
        cut = self._notes.cut
        return rows * cut.stride, np.full(len(rows), cut.length, np.int64)

    def name(self, row: int) -> str:
        """The file and the tokens."""
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
        """Read a field's rows, or parts of them, into their places."""
        starts = rows * self._notes.cut.stride
        if corners is not None:
            starts = starts + corners[:, 0]
        length = out.shape[1]
        if field != _TOKENS:
            out[places] = self._beside(field, starts, length)
            return
        parts = self._parts(data, starts.tolist(), (starts + length).tolist())
        spots = range(*places.indices(len(out))) if isinstance(places, slice) else places.tolist()
        for nth, (place, part) in enumerate(zip(spots, parts, strict=True)):
            out[place] = part
            if self._is_checked and (reason := self._judge(part)):
                wrong[nth] = reason
                out[place] = 0

    def plain(self, field: str, *, data: ShardData) -> StridedRows | None:
        """Where the sequences lie, of a local shard."""
        view = data.view(0, size_bytes=0) if field == _TOKENS else None
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
        """First token of each document, counted from the shard's first."""
        begins: Ints = np.cumsum(self._notes.lengths, dtype=np.int64) - self._notes.lengths
        return begins

    def _beside(self, field: str, starts: Ints, length: int) -> Ints:
        """Of each token its document's number among all, or its place in that."""
        begins = self._begins
        first = np.searchsorted(begins, starts, side="right") - 1
        counts = np.searchsorted(begins, starts + length, side="left") - first
        # Each sequence's documents, and how much of each is in it: none of an empty one.
        numbers = number_ranges(first, counts)
        low = np.maximum(begins[numbers], np.repeat(starts, counts))
        ends = begins[numbers] + self._notes.lengths[numbers].astype(np.int64)
        lengths = np.minimum(ends, np.repeat(starts + length, counts)) - low
        if field == _DOCUMENT:
            return np.repeat(numbers + self._notes.first_document, lengths).reshape(-1, length)
        places = begins[numbers] - np.where(numbers == 0, self._notes.skip, 0)
        at = starts[:, None] + np.arange(length)
        found: Ints = at - np.repeat(places, lengths).reshape(-1, length)
        return found

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Nothing: all fields have one shape."""
        del rows, fields, data, wrong
        return {}


class _CutReader(_TokenReader):
    """Documents cut into pieces."""

    def __init__(self, notes: TokenNotes, shard: ChunkedShardFacts) -> None:
        super().__init__(notes, shard)
        self._pieces = cut_documents(notes.lengths, notes.cut)

    def _offset(self, piece: int) -> int:
        """The place of a piece in its document."""
        found = self._pieces
        is_first = int(found.documents[piece]) == 0
        return int(found.offsets[piece]) + (self._notes.skip if is_first else 0)

    def _piece_name(self, piece: int) -> str:
        found = self._pieces
        document = self._notes.first_document + int(found.documents[piece])
        start, length = self._offset(piece), int(found.lengths[piece])
        return f"{self._notes.name}: document {document}[{start}:{start + length}]"

    def _read_pieces(self, numbers: Ints, data: ShardData) -> list[NDArray[Any]]:
        starts = self._pieces.starts[numbers]
        return self._parts(data, starts.tolist(), (starts + self._pieces.lengths[numbers]).tolist())


class _PieceReader(_CutReader):
    """A piece is a sample, and as long as it is."""

    def __init__(self, notes: TokenNotes, shard: ChunkedShardFacts) -> None:
        super().__init__(notes, shard)
        if len(self._pieces) != shard.samples:
            raise ValueError("its pieces aren't those of its documents")

    def _wanted(self, rows: Ints) -> tuple[Ints, Ints]:
        return self._pieces.starts[rows], self._pieces.lengths[rows]

    def lengths(self, field: str, rows: Ints) -> Ints:
        """Tokens of each piece."""
        assert field == _TOKENS, field
        lengths: Ints = self._pieces.lengths[rows]
        return lengths

    def name(self, row: int) -> str:
        """The file, the document and the tokens of it."""
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
        """Of each piece its document's number among all, or its place in that."""
        del data, wrong, corners
        found = self._pieces
        if field == _DOCUMENT:
            out[places] = found.documents[rows] + self._notes.first_document
            return
        first = found.documents[rows] == 0
        out[places] = found.offsets[rows] + np.where(first, self._notes.skip, 0)

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """The tokens of pieces."""
        if _TOKENS not in fields:
            return {}
        parts = self._read_pieces(rows, data)
        if self._is_checked:
            for place, part in enumerate(parts):
                if reason := self._judge(part):
                    wrong[place] = reason
                    parts[place] = part[:0]
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        values = np.empty(int(offsets[-1]), self._out)
        for part, (a, b) in zip(parts, pairwise(offsets.tolist()), strict=True):
            values[a:b] = part
        return {_TOKENS: RaggedColumn(values, offsets)}


class _PackedReader(_CutReader):
    """Pieces packed to sequences of one length, filled up with 0 at their ends."""

    def __init__(self, notes: TokenNotes, shard: ChunkedShardFacts) -> None:
        super().__init__(notes, shard)
        self._packing = pack_pieces(self._pieces.lengths, room=notes.cut.length)
        if len(self._packing) != shard.samples:
            raise ValueError("its sequences aren't those of its documents")

    def _members(self, rows: Ints) -> tuple[Ints, Ints]:
        """The pieces of some sequences, one after the other, and how many each has."""
        bounds = self._packing.bounds
        counts = bounds[rows + 1] - bounds[rows]
        return self._packing.pieces[number_ranges(bounds[rows], counts)], counts

    def _wanted(self, rows: Ints) -> tuple[Ints, Ints]:
        members, _ = self._members(rows)
        return self._pieces.starts[members], self._pieces.lengths[members]

    def name(self, row: int) -> str:
        """The file, and the documents."""
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
        """Fill sequences with their documents, with the numbers of these in the sequence (-1 behind
        the last), or with places in them."""
        del corners
        if not len(rows):
            return
        members, counts = self._members(rows)
        lengths = self._pieces.lengths[members]
        if field != _TOKENS:
            out[places] = _piece_values(field, lengths, counts, out.shape[1])
            return
        spots = range(*places.indices(len(out))) if isinstance(places, slice) else places.tolist()
        parts = iter(self._read_pieces(members, data))
        for nth, (place, count) in enumerate(zip(spots, counts.tolist(), strict=True)):
            sequence, at = out[place], 0
            for part in islice(parts, count):
                sequence[at : at + len(part)] = part
                at += len(part)
                if self._is_checked and (reason := self._judge(part)):
                    wrong.setdefault(nth, reason)
            sequence[at:] = 0

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Nothing: all fields have one shape."""
        del rows, fields, data, wrong
        return {}


def _piece_values(field: str, lengths: Ints, counts: Ints, room: int) -> Ints:
    """Of each token of packed sequences the number of its piece, -1 behind the last, or its place
    in that. lengths: of the pieces, sequence by sequence; counts: pieces of each sequence."""
    ends = np.cumsum(counts)
    used = np.add.reduceat(lengths, ends - counts)
    # What a sequence is filled up with is one more piece.
    every = np.insert(lengths, ends, room - used)
    begins = np.cumsum(every) - every
    lasts = ends + np.arange(len(ends))
    if field == _DOCUMENT:
        numbers = number_ranges(np.zeros_like(counts), counts + 1)
        numbers[lasts] = -1
        return np.repeat(numbers, every).reshape(-1, room)
    places = np.arange(len(counts) * room) - np.repeat(begins, every)
    is_there = np.arange(room) < used[:, None]
    return np.where(is_there, places.reshape(-1, room), 0)


class TokenFormat(ChunkFormat):
    """Streams of token ids, cut into sequences."""

    name = "tokens"
    least_sample_bytes: ClassVar[int] = 0  # sequences may overlap

    @property
    def indexing(self) -> Indexing:
        """How a folder of such files gets its index."""
        from penstock.readers.formats.tokens.token_listing import TokenIndexing

        return TokenIndexing()

    def recognises(self, origin: Origin) -> bool:
        """Whether there are Megatron's files at the root, or flat ones of which the user says what
        numbers they are; others don't say what they are."""
        found = origin.top(lambda name: name.endswith((b".bin", b".idx"))).entries
        if not found:
            return False
        from penstock.readers.formats.dataset_arguments import Sampling
        from penstock.readers.formats.tokens.token_files import has_magic

        idx = next((entry for entry in found if entry.name.endswith(b".idx")), None)
        if idx is None and origin.selection is not None:  # what lies beside a file that was named
            idx = origin.entry(found[0].name.removesuffix(b".bin") + b".idx")
        if idx is not None:
            return has_magic(origin, idx)
        return Sampling.of(origin.arrangement).dtype is not None

    def default_fields(self, schema: Schema) -> tuple[str, ...] | None:
        """The tokens alone; of packed documents all, as a sequence isn't one without."""
        from penstock.readers.fields import Array

        document = schema.get("document")
        is_packed = isinstance(document, Array) and document.dtype == "int32"
        return None if is_packed else ("tokens",)

    def open_chunks(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard; reads none of its samples. Raises CorruptShardError."""
        from penstock.readers.formats.tokens.token_sequences import TokenNotes

        try:
            return token_reader(TokenNotes.from_bytes(shard.notes), shard)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise CorruptShardError(
                f"A part of the index of tokens is damaged: {error}."
            ) from error


FORMAT = TokenFormat()
