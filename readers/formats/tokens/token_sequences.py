"""Cut streams of tokens into sequences and shards, pack documents into sequences, and record both.

A document is cut into pieces of at most `length` tokens, one every `stride`; the last piece holds
the rest. If sequences run across documents, a file's whole stream is cut in the same way, without a
last partial piece. Shards hold whole sequences. All of this is arithmetic.

Pieces are packed whole into sequences of one length by first-fit decreasing: the longest piece
first, each into the first sequence that has room for it (D. S. Johnson, Near-optimal bin packing
algorithms, 1973). All pieces of one length are placed together, so a shard takes as many steps as
it has different lengths. The result follows from the lengths alone, not from a seed, an epoch or
the world size: a packed sequence is a row like any other, and every epoch has the same number of
them.

A sidecar records how a shard is cut and where its documents end (`TokenNotes`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.readers.formats.dataset_arguments import DocumentMode
    from penstock.readers.types import Ints


TOKENS, DOCUMENT, POSITION = "tokens", "document", "position"
"""The fields of a sample. The last two exist if the documents are known."""

UNCUT = 2**40
"""The length of a sequence that stands for documents that aren't cut."""


class Cut(NamedTuple):
    """The most tokens of a sequence, and the tokens from the start of one sequence to the next."""

    length: int
    stride: int


Part = tuple[int, int]
"""A contiguous part of a file's tokens that becomes a shard: [start, end)."""


def number_ranges(firsts: Ints, counts: Ints) -> Ints:
    """Return the integers of all ranges [first, first + count), one range after the other."""
    ends = np.cumsum(counts)
    return np.repeat(firsts - (ends - counts), counts) + np.arange(int(counts.sum()))


def sequence_count(tokens: int, cut: Cut) -> int:
    """Return the number of whole sequences in a stream of this many tokens."""
    return 0 if tokens < cut.length else (tokens - cut.length) // cut.stride + 1


def stream_parts(tokens: int, cut: Cut, *, target: int) -> Iterator[Part]:
    """Yield the shards of a stream, of about `target` tokens each; their sizes differ by at most
    one sequence.

    A part contains all of its last sequence, which may overlap the first one of the next part.
    """
    count = sequence_count(tokens, cut)
    parts = min(count, max(1, round(count * cut.stride / target)))
    for number in range(parts):
        first, last = count * number // parts, count * (number + 1) // parts
        yield first * cut.stride, (last - 1) * cut.stride + cut.length


def piece_counts(lengths: NDArray[np.integer], cut: Cut) -> Ints:
    """Return the number of pieces of each document, int64, shape (documents,); 0 for an empty
    one."""
    wide = lengths.astype(np.int64)
    more = -(-np.maximum(wide - cut.length, 0) // cut.stride)
    return np.where(wide > 0, 1 + more, 0)


def cut_documents(lengths: NDArray[np.integer], cut: Cut) -> tuple[Ints, Ints, Ints]:
    """Cut documents that follow one another in a stream into pieces. Returns the first token of
    each piece in the stream, its tokens, and the number of its document, in order, int64, shape
    (pieces,) each."""
    counts = piece_counts(lengths, cut)
    wide = lengths.astype(np.int64)
    documents = np.repeat(np.arange(len(wide)), counts)
    offsets = number_ranges(np.zeros_like(counts), counts) * cut.stride
    starts = (np.cumsum(wide) - wide)[documents] + offsets
    return starts, np.minimum(wide[documents] - offsets, cut.length), documents


def _find(bounds: Ints, token: int) -> tuple[int, int]:
    """Return the document that contains a token, and the token's position in it; (n, 0) for the
    end of the last document."""
    document = int(np.searchsorted(bounds, token, side="right")) - 1
    return document, token - int(bounds[document])


def slice_documents(bounds: Ints, start: int, end: int) -> tuple[int, int, Ints]:
    """Return the documents of tokens [start, end), which must not be empty: the number of the
    first one, its tokens that precede `start`, and the tokens of each document in the range.

    bounds: the first token of each document of a file, and the end of the last one, int64, shape (n
    + 1,). There may be 10^8 documents.
    """
    first, skip = _find(bounds, start)
    inside = np.clip(bounds[first : _find(bounds, end - 1)[0] + 2], start, end)
    return first, skip, inside[1:] - inside[:-1]


def document_parts(bounds: Ints, cut: Cut, *, target: int) -> Iterator[Part]:
    """Yield the shards of a file's documents, of about `target` tokens each; every piece of a
    document is in exactly one. bounds: as above."""
    total, begin = int(bounds[-1]), 0
    count = max(1, round(total / target))
    for number in range(1, count + 1):
        # A border is the start of a piece; the piece before it may extend beyond that start.
        border, halo = total * number // count, 0
        document, offset = _find(bounds, border)
        if document < len(bounds) - 1:
            pieces = int(piece_counts(np.diff(bounds[document : document + 2]), cut)[0])
            piece = min(offset // cut.stride, pieces - 1)
            border += piece * cut.stride - offset
            halo = (cut.length - cut.stride) if piece else 0
        if border > begin:
            yield begin, border + halo
            begin = border


def pack_pieces(lengths: Ints, *, room: int) -> tuple[Ints, Ints]:
    """Pack pieces into sequences of `room` tokens.

    lengths: tokens of each piece, 1 to room, shape (pieces,). Returns the numbers of the pieces,
    sequence by sequence, int64, shape (pieces,); and the first entry of each sequence in them, and
    the end, int64, shape (n + 1,).

    Sequences are sorted by their first pieces. The pieces of a sequence are sorted by a hash of
    their numbers: if they were sorted by length, a model would learn which lengths come last.
    """
    if not len(lengths):
        return np.empty(0, np.int64), np.zeros(1, np.int64)
    hashes = _hashes(len(lengths))
    # The longest pieces first; pieces of one length by hash, which separates neighbours.
    order = np.lexsort((hashes, -lengths))
    bins = np.empty(len(lengths), np.int64)
    bins[order] = first_fit(lengths[order], room)
    # Number the sequences by their first piece instead of the order in which they were opened.
    first = np.full(int(bins.max()) + 1, len(lengths), np.int64)
    np.minimum.at(first, bins, np.arange(len(lengths)))
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    bins = number[bins]
    counts = np.bincount(bins, minlength=len(first))
    return np.lexsort((hashes, bins)), np.concatenate(([0], np.cumsum(counts))).astype(np.int64)


def first_fit(lengths: Ints, room: int) -> Ints:
    """Return the bin of each piece by first fit. lengths: in descending order."""
    bins, rooms = np.empty(len(lengths), np.int64), np.empty(0, np.int64)
    borders = np.flatnonzero(np.diff(lengths, prepend=-1, append=-1)).tolist()
    for begin, end in pairwise(borders):  # pieces of one length
        length, count = int(lengths[begin]), end - begin
        places = np.flatnonzero(rooms >= length)
        fits = rooms[places] // length
        if (more := -(-(count - int(fits.sum())) // (room // length))) > 0:
            places = np.append(places, len(rooms) + np.arange(more))
            fits = np.append(fits, np.full(more, room // length))
            rooms = np.append(rooms, np.full(more, room))
        fits = np.minimum(fits, np.maximum(count - (np.cumsum(fits) - fits), 0))
        rooms[places] -= fits * length
        bins[begin:end] = np.repeat(places, fits)
    return bins


def _hashes(count: int) -> NDArray[np.uint64]:
    """Return a pseudorandom number for each piece: splitmix64 of its number (Steele, Lea, Flood,
    Fast splittable pseudorandom number generators, 2014)."""
    with np.errstate(over="ignore"):
        x = (np.arange(count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_LENGTH_DTYPES = ("uint8", "uint16", "uint32", "int64")
_MAX_NUMBER = 2**48


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenNotes:
    """The index's notes on one shard of tokens.

    dtype: numpy's `dtype.str` of the file. cut: of sequences. documents: the mode, see
    `DocumentMode`. vocabulary: ids must be below it; None: they aren't checked. name: of the file.
    token: the shard's first token, counted from the file's first. first_document: the number in the
    dataset of the shard's first document. skip: tokens of that document that precede the shard.
    lengths: tokens of each document in the shard; empty if the file has no documents.
    """

    dtype: str = ""
    cut: Cut
    documents: DocumentMode
    vocabulary: int | None
    name: str = ""
    token: int = 0
    first_document: int = 0
    skip: int = 0
    lengths: NDArray[np.integer] = field(default_factory=lambda: np.empty(0, np.uint8))

    def to_bytes(self) -> bytes:
        """Encode the notes: a line of JSON, then the lengths in the smallest integers that hold
        them."""
        kind = np.min_scalar_type(int(self.lengths.max())).name if len(self.lengths) else "uint8"
        kind = kind if kind in _LENGTH_DTYPES else "int64"
        lengths = self.lengths.astype(np.dtype(kind).newbyteorder("<"))
        return json.dumps({**vars(self), "lengths": kind}).encode() + b"\n" + lengths.tobytes()

    @classmethod
    def from_bytes(cls, notes: bytes) -> TokenNotes:
        """Decode and check the notes of a sidecar, which isn't trusted. Raises ValueError,
        TypeError or KeyError."""
        line, _, rest = notes.partition(b"\n")
        head: dict[str, Any] = json.loads(line)
        if (kind := head.pop("lengths")) not in _LENGTH_DTYPES:
            raise ValueError("the dtype of its lengths is invalid")
        lengths = np.frombuffer(rest, np.dtype(kind).newbyteorder("<"))
        found = cls(**{**head, "cut": Cut(*head["cut"]), "lengths": lengths})
        numbers = [*found.cut, found.token, found.first_document, found.skip]
        numbers += [] if found.vocabulary is None else [found.vocabulary]
        if not all(type(number) is int and 0 <= number <= _MAX_NUMBER for number in numbers):
            raise ValueError("a number is out of range")
        if not all(found.cut) or found.documents not in ("across", "within", "pack"):
            raise ValueError("its sequence length, stride or mode of documents is invalid")
        if np.dtype(found.dtype).kind not in "iu" or not isinstance(found.name, str):
            raise ValueError("its dtype or name is invalid")
        if len(lengths) and (int(lengths.min()) < 0 or int(lengths.max()) > _MAX_NUMBER):
            raise ValueError("the length of a document is out of range")
        return found


class ShardSequences:
    """Computes which tokens each sample of a shard consists of.

    A sample is one range of the shard's tokens, or several ranges if pieces are packed. count: the
    number of samples.
    """

    def __init__(self, notes: TokenNotes, tokens: int) -> None:
        """tokens: of the shard."""
        self._notes = notes
        # The first token of each document in the shard; of each piece, if documents are cut; and
        # the first piece of each sequence, if they are packed.
        self._begins = np.cumsum(notes.lengths, dtype=np.int64) - notes.lengths
        self._starts: Ints | None = None
        self._bounds: Ints | None = None
        self.count = sequence_count(tokens, notes.cut)
        if notes.documents != "across":
            pieces = cut_documents(notes.lengths, notes.cut)
            self.count = len(pieces[0])
            if notes.documents == "pack":
                order, self._bounds = pack_pieces(pieces[1], room=notes.cut.length)
                pieces = (pieces[0][order], pieces[1][order], pieces[2][order])
                self.count = len(self._bounds) - 1
            self._starts, self._lengths, self._documents = pieces

    def ranges(self, rows: Ints) -> tuple[Ints, Ints, Ints | None]:
        """Return the first tokens and the lengths of the ranges that some rows consist of, row by
        row, and the number of ranges of each row; None if each has one."""
        if self._starts is None:
            cut = self._notes.cut
            return rows * cut.stride, np.full(len(rows), cut.length, np.int64), None
        if self._bounds is None:
            return self._starts[rows], self._lengths[rows], None
        counts = self._bounds[rows + 1] - self._bounds[rows]
        pieces = number_ranges(self._bounds[rows], counts)
        return self._starts[pieces], self._lengths[pieces], counts

    def document_values(self, field: str, rows: Ints, shape: tuple[int, ...]) -> Ints:
        """Return the number of the document of each token, or each token's position in it. shape:
        of a sample; if it is (), the values are those of each row's first token."""
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

    def _runs(self, rows: Ints, length: int = 0) -> tuple[Ints, Ints, Ints]:
        """Return the runs of tokens of one document in the first `length` tokens of each row: the
        number of the document, -1 for padding; the position of the first token; the tokens.

        A packed sequence numbers its own documents, and positions count from a piece's start.
        """
        notes, begins = self._notes, self._begins
        if self._starts is not None and self._bounds is None:
            numbers = self._documents[rows]
            positions = self._starts[rows] - begins[numbers]
            positions += np.where(numbers == 0, notes.skip, 0)
            return numbers + notes.first_document, positions, self._lengths[rows]
        starts, lengths, counts = self.ranges(rows)
        if counts is not None:
            ends = np.cumsum(counts)
            used = np.add.reduceat(lengths, ends - counts)
            numbers = number_ranges(np.zeros_like(counts), counts + 1)
            numbers[ends + np.arange(len(ends))] = -1  # the padding of each sequence
            return numbers, np.zeros_like(numbers), np.insert(lengths, ends, length - used)
        first = np.searchsorted(begins, starts, side="right") - 1
        counts = np.searchsorted(begins, starts + length, side="left") - first
        numbers = number_ranges(first, counts)  # an empty document has no tokens
        low = np.maximum(begins[numbers], np.repeat(starts, counts))
        document_ends = begins[numbers] + notes.lengths[numbers].astype(np.int64)
        high = np.minimum(document_ends, np.repeat(starts + length, counts))
        positions = low - begins[numbers] + np.where(numbers == 0, notes.skip, 0)
        return numbers + notes.first_document, positions, high - low

    def name(self, row: int) -> str:
        """Return the file and the range of tokens, or the first document and the range in it."""
        notes = self._notes
        starts, lengths, _ = self.ranges(np.array([row], np.int64))
        start, length, place, more = int(starts[0]), int(lengths[0]), "", ""
        if notes.documents == "across":
            start += notes.token
        else:
            document = int(np.searchsorted(self._begins, start, side="right")) - 1
            start += (0 if document else notes.skip) - int(self._begins[document])
            place = f": document {notes.first_document + document}"
            more = f" and {len(starts) - 1} more" if len(starts) > 1 else ""
        return f"{notes.name}{place}[{start}:{start + length}]{more}"
