"""Cut streams of tokens into sequences and shards, pack documents into sequences, and record both.

A document is cut into pieces of at most `length` tokens, one every `stride`; the last piece holds
the rest. If sequences run across documents, a file's whole stream is cut in the same way, without a
last partial piece. Shards hold whole sequences. All of this is arithmetic.

Pieces are packed whole into sequences of one length by first-fit decreasing: the longest piece
first, each into the first sequence that has room for it (D. S. Johnson, Near-optimal bin packing
algorithms, 1973). All pieces of one length are placed together, on runs of neighbouring sequences
that have the same room left, so a shard takes as many steps as it has different lengths. The result
follows from the lengths alone, not from a seed, an epoch or the world size: a packed sequence is a
row like any other, and every epoch has the same number of them.

A sidecar records how a shard is cut and where its documents end (`TokenNotes`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.readers.formats.dataset_arguments import DocumentMode

    Ints = NDArray[np.int64]

TOKENS, DOCUMENT, POSITION = "tokens", "document", "position"
"""The fields of a sample. The last two exist if the documents are known."""

UNCUT = 2**40
"""The length of a sequence that stands for documents that aren't cut."""

BLOCK = 2**16
"""Documents of a file that share one entry in the sums that `DocumentLengths` searches."""


class Cut(NamedTuple):
    """The most tokens of a sequence, and the tokens from the start of one sequence to the next."""

    length: int
    stride: int


class StreamPart(NamedTuple):
    """A contiguous part of a file's tokens that becomes a shard: tokens [start, end).

    sequences: how many it holds; 0 if that isn't known yet.
    """

    start: int
    end: int
    sequences: int


def number_ranges(firsts: Ints, counts: Ints) -> Ints:
    """Return the integers of all ranges [first, first + count), one range after the other."""
    ends = np.cumsum(counts)
    return np.repeat(firsts - (ends - counts), counts) + np.arange(
        int(ends[-1]) if len(ends) else 0
    )


def sequence_count(tokens: int, cut: Cut) -> int:
    """Return the number of whole sequences in a stream of this many tokens."""
    return 0 if tokens < cut.length else (tokens - cut.length) // cut.stride + 1


def stream_parts(tokens: int, cut: Cut, *, target: int) -> Iterator[StreamPart]:
    """Yield the shards of a stream, of about `target` tokens each; their sizes differ by at most
    one sequence.

    A part contains all of its last sequence, which may overlap the first one of the next part.
    """
    count = sequence_count(tokens, cut)
    parts = min(count, max(1, round(count * cut.stride / target))) if count else 0
    for number in range(parts):
        first, last = count * number // parts, count * (number + 1) // parts
        end = (last - 1) * cut.stride + cut.length
        yield StreamPart(first * cut.stride, end, last - first)


def piece_counts(lengths: NDArray[np.integer], cut: Cut) -> Ints:
    """Return the number of pieces of each document, int64, shape (documents,); 0 for an empty
    one."""
    wide = lengths.astype(np.int64)
    more = -(-np.maximum(wide - cut.length, 0) // cut.stride)
    return np.where(wide > 0, 1 + more, 0)


@dataclass(frozen=True, slots=True, eq=False)
class DocumentPieces:
    """The pieces of some documents; all arrays are int64, shape (pieces,).

    documents: number of each piece's document. offsets: its first token, counted from the
    document's first. starts: its first token in the stream. lengths: its tokens.
    """

    documents: Ints
    offsets: Ints
    starts: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.starts)


def cut_documents(lengths: NDArray[np.integer], cut: Cut) -> DocumentPieces:
    """Cut documents that follow one another in a stream into pieces, in order."""
    counts = piece_counts(lengths, cut)
    wide = lengths.astype(np.int64)
    documents = np.repeat(np.arange(len(wide)), counts)
    ranks = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = ranks * cut.stride
    return DocumentPieces(
        documents=documents,
        offsets=offsets,
        starts=(np.cumsum(wide) - wide)[documents] + offsets,
        lengths=np.minimum(wide[documents] - offsets, cut.length),
    )


class DocumentSlice(NamedTuple):
    """The documents of a part of a stream.

    first: number of the first one. skip: its tokens that precede the part. lengths: tokens of each
    document in the part.
    """

    first: int
    skip: int
    lengths: NDArray[np.integer]


class DocumentLengths:
    """The documents of a file, one after the other.

    lengths: tokens of each, of any integer dtype, shape (n,). There may be 10^8 of them, so no
    other array of this length is made.
    """

    def __init__(self, lengths: NDArray[np.integer]) -> None:
        self.lengths = lengths
        starts = np.arange(0, len(lengths), BLOCK)
        sums = [int(lengths[at : at + BLOCK].sum(dtype=np.int64)) for at in starts.tolist()]
        self._ends = np.cumsum(sums, dtype=np.int64)

    @property
    def tokens(self) -> int:
        """The tokens of all documents."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def find(self, token: int) -> tuple[int, int]:
        """Return the document that contains a token, and the token's position in it; (n, 0) for a
        token behind the last document."""
        if token >= self.tokens:
            return len(self.lengths), 0
        block = int(np.searchsorted(self._ends, token, side="right"))
        at = block * BLOCK
        ends = np.cumsum(self.lengths[at : at + BLOCK], dtype=np.int64)
        inside = token - (int(self._ends[block - 1]) if block else 0)
        place = int(np.searchsorted(ends, inside, side="right"))
        return at + place, inside - (int(ends[place - 1]) if place else 0)

    def slice(self, start: int, end: int) -> DocumentSlice:
        """Return the documents of tokens [start, end), which must not be empty."""
        first, skip = self.find(start)
        last, _ = self.find(end - 1)
        lengths = self.lengths[first : last + 1].copy()
        lengths[0] -= skip
        lengths[-1] -= int(lengths.sum(dtype=np.int64)) - (end - start)
        return DocumentSlice(first, skip, lengths)

    def parts(self, cut: Cut, *, target: int) -> Iterator[StreamPart]:
        """Yield the shards, of about `target` tokens each; every piece is in exactly one."""
        total, begin = self.tokens, 0
        count = max(1, round(total / target))
        for number in range(1, count + 1):
            border, halo = self._border(total * number // count, cut)
            if border > begin:
                yield StreamPart(begin, border + halo, 0)
                begin = border

    def _border(self, token: int, cut: Cut) -> tuple[int, int]:
        """Return the start of the piece that contains a token, and by how many tokens the piece
        before it extends beyond that start."""
        document, offset = self.find(token)
        if document == len(self.lengths):
            return self.tokens, 0
        count = int(piece_counts(self.lengths[document : document + 1], cut)[0])
        piece = min(offset // cut.stride, count - 1)
        return token - offset + piece * cut.stride, (cut.length - cut.stride) if piece else 0


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequences:
    """The pieces of each packed sequence.

    pieces: their numbers, sequence by sequence, int64, shape (pieces,). bounds: the first entry of
    each sequence in `pieces`, and the end, int64, shape (n + 1,).
    """

    pieces: Ints
    bounds: Ints

    def __len__(self) -> int:
        return len(self.bounds) - 1


def pack_pieces(lengths: Ints, *, room: int) -> PackedSequences:
    """Pack pieces into sequences of `room` tokens.

    lengths: tokens of each piece, 1 to room, shape (pieces,).

    Sequences are sorted by their first pieces. The pieces of a sequence are sorted by a hash of
    their numbers: if they were sorted by length, a model would learn which lengths come last.
    """
    if not len(lengths):
        return PackedSequences(np.empty(0, np.int64), np.zeros(1, np.int64))
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
    bounds = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return PackedSequences(np.lexsort((hashes, bins)), bounds)


def first_fit(lengths: Ints, room: int) -> Ints:
    """Return the bin of each piece by first fit. lengths: in descending order."""
    borders = np.flatnonzero(np.diff(lengths)) + 1
    begins = np.concatenate(([0], borders))
    ends = np.concatenate((borders, [len(lengths)]))
    runs = _RoomRuns(room)
    counts = (ends - begins).tolist()
    return np.concatenate(
        [runs.put(*each) for each in zip(lengths[begins].tolist(), counts, strict=True)]
    )


class _RoomRuns:
    """The bins in the order in which they were opened, as runs of bins with the same room left."""

    def __init__(self, room: int) -> None:
        self._room, self._opened = room, 0
        # Of each run: its first bin, its number of bins, the room that each of them has left.
        self._runs = np.empty((3, 0), np.int64)

    def put(self, length: int, count: int) -> Ints:
        """Place `count` pieces of one length, at least one, and return their bins, int64, shape
        (count,)."""
        each = self._runs[2] // length
        sums = np.cumsum(each * self._runs[1])
        last = int(np.searchsorted(sums, count))  # the run that receives the last piece
        if last == len(sums):
            more = count - (int(sums[-1]) if len(sums) else 0)
            opened = -(-more // (self._room // length))
            self._runs = np.column_stack((self._runs, (self._opened, opened, self._room)))
            self._opened += opened
            each = np.append(each, self._room // length)
        firsts, counts, rooms = self._runs
        used = np.flatnonzero(each[: last + 1])
        bins = np.repeat(
            number_ranges(firsts[used], counts[used]), np.repeat(each[used], counts[used])
        )[:count]
        rooms[: last + 1] -= each[: last + 1] * length
        # In the last run, one bin may have room left, and those behind it received nothing.
        last_bin = int(bins[-1])
        in_last_bin = count - int(np.searchsorted(bins, last_bin))
        first, size, left = self._runs[:, last].tolist()
        most = int(each[last])
        parts = [(first, last_bin - first, left)]
        parts.append((last_bin, 1, left + (most - in_last_bin) * length))
        parts.append((last_bin + 1, first + size - last_bin - 1, left + most * length))
        split = np.array([part for part in parts if part[1]], np.int64).T
        self._runs = np.hstack((self._runs[:, :last], split, self._runs[:, last + 1 :]))
        if self._runs.shape[1] > 64:  # full bins receive nothing more
            self._runs = self._runs[:, self._runs[2] > 0]
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenNotes:
    """The index's notes on one shard of tokens.

    dtype: numpy's `dtype.str` of the file. cut: of sequences. documents: the mode, see
    `DocumentMode`. vocabulary: ids must be below it; None: they aren't checked. name: of the file.
    token: the shard's first token, counted from the file's first. first_document: the number in the
    dataset of the shard's first document. skip: tokens of that document that precede the shard.
    lengths: tokens of each document in the shard; empty if the file has no documents.
    """

    dtype: str
    cut: Cut
    documents: DocumentMode
    vocabulary: int | None
    name: str
    token: int
    first_document: int = 0
    skip: int = 0
    lengths: NDArray[np.integer] = field(default_factory=lambda: np.empty(0, np.uint8))

    def to_bytes(self) -> bytes:
        """Encode the notes: a line of JSON, then the lengths in the smallest integers that hold
        them."""
        kind = np.min_scalar_type(int(self.lengths.max())).name if len(self.lengths) else "uint8"
        kind = kind if kind in _LENGTH_DTYPES else "int64"
        head = {
            "dtype": self.dtype,
            "cut": list(self.cut),
            "documents": self.documents,
            "vocabulary": self.vocabulary,
            "name": self.name,
            "token": self.token,
            "first_document": self.first_document,
            "skip": self.skip,
            "lengths": kind,
        }
        lengths = self.lengths.astype(np.dtype(kind).newbyteorder("<"))
        return json.dumps(head).encode() + b"\n" + lengths.tobytes()

    @classmethod
    def from_bytes(cls, notes: bytes) -> TokenNotes:
        """Decode and check the notes of a sidecar, which isn't trusted. Raises ValueError."""
        line, _, rest = notes.partition(b"\n")
        head: Any = json.loads(line)
        counts = [head[name] for name in ("token", "first_document", "skip")]
        vocabulary = head["vocabulary"]
        length, stride = head["cut"]
        numbers = [length, stride, *counts, *([] if vocabulary is None else [vocabulary])]
        if not all(type(number) is int and 0 <= number <= _MAX_NUMBER for number in numbers):
            raise ValueError("a number is out of range")
        if head["lengths"] not in _LENGTH_DTYPES or not length or not stride:
            raise ValueError("its sequence length, stride or dtype of lengths is invalid")
        if head["documents"] not in ("across", "within", "pack"):
            raise ValueError("its mode of documents is unknown")
        dtype = np.dtype(head["dtype"])
        if dtype.kind not in "iu" or not isinstance(head["name"], str):
            raise ValueError("its dtype or name is invalid")
        lengths = np.frombuffer(rest, np.dtype(head["lengths"]).newbyteorder("<"))
        if len(lengths) and (int(lengths.min()) < 0 or int(lengths.max()) > _MAX_NUMBER):
            raise ValueError("the length of a document is out of range")
        names = ("documents", "vocabulary", "name", "token", "first_document", "skip")
        return cls(
            dtype=dtype.str,
            cut=Cut(length, stride),
            lengths=lengths,
            **{name: head[name] for name in names},
        )
