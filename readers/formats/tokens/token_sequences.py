"""Cut streams of tokens into sequences and shards, pack documents into sequences, and note both.

A document is cut into pieces of at most `length` tokens, one every `stride`; the last is what is
left. A file's stream is cut alike where sequences run across documents, but without that last one.
Shards hold whole sequences. All of that is arithmetic.

Whole pieces of documents are packed into sequences of one length by first-fit decreasing:
the longest piece first, each into the first sequence that has room for it (D. S. Johnson,
Near-optimal bin packing algorithms, 1973). All pieces of one length are taken together: a run is
how many neighbouring sequences have the same room, so that a shard of any number of pieces takes as
many steps as there are lengths. The result follows from the lengths alone: no seed, no epoch, no
world. So packed sequences are rows like others: whoever asks for a row gets the same tokens, and an
epoch has as many each time.

A sidecar notes of a shard how it is cut, and where its documents end (`TokenNotes`).
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

UNCUT = 2**40
"""In place of a sequence's length: documents aren't cut."""

_BLOCK = 2**16


class Cut(NamedTuple):
    """Tokens of a sequence at most, and from one to the next."""

    length: int
    stride: int


class StreamPart(NamedTuple):
    """A contiguous part of a file's tokens that is a shard: [start, end), and how many sequences
    it holds, 0 where that isn't known yet."""

    start: int
    end: int
    sequences: int


def number_ranges(firsts: Ints, counts: Ints) -> Ints:
    """The numbers [first, first + count) of each, end to end."""
    ends = np.cumsum(counts)
    return np.repeat(firsts - (ends - counts), counts) + np.arange(
        int(ends[-1]) if len(ends) else 0
    )


def sequence_count(tokens: int, cut: Cut) -> int:
    """Whole sequences of so many tokens."""
    return 0 if tokens < cut.length else (tokens - cut.length) // cut.stride + 1


def stream_parts(tokens: int, cut: Cut, *, target: int) -> Iterator[StreamPart]:
    """Shards of a stream, of about `target` tokens each and equal to a sequence. A part holds the
    end of its last sequence, where that overlaps the next part's first."""
    count = sequence_count(tokens, cut)
    parts = min(count, max(1, round(count * cut.stride / target))) if count else 0
    for number in range(parts):
        first, last = count * number // parts, count * (number + 1) // parts
        end = (last - 1) * cut.stride + cut.length
        yield StreamPart(first * cut.stride, end, last - first)


def piece_counts(lengths: NDArray[np.integer], cut: Cut) -> Ints:
    """Into how many pieces documents are cut, int64, shape (documents,); an empty one into none."""
    long = lengths.astype(np.int64)
    more = -(-np.maximum(long - cut.length, 0) // cut.stride)
    return np.where(long > 0, 1 + more, 0)


@dataclass(frozen=True, slots=True, eq=False)
class DocumentPieces:
    """The pieces of some documents, all int64, shape (pieces,). documents: number of each one's;
    offsets: of its first token in that; starts: in the stream; lengths: tokens."""

    documents: Ints
    offsets: Ints
    starts: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.starts)


def cut_documents(lengths: NDArray[np.integer], cut: Cut) -> DocumentPieces:
    """The pieces of documents that lie end to end, in order."""
    counts = piece_counts(lengths, cut)
    long = lengths.astype(np.int64)
    documents = np.repeat(np.arange(len(long)), counts)
    nth = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = nth * cut.stride
    return DocumentPieces(
        documents=documents,
        offsets=offsets,
        starts=(np.cumsum(long) - long)[documents] + offsets,
        lengths=np.minimum(long[documents] - offsets, cut.length),
    )


class DocumentSlice(NamedTuple):
    """The documents of a part of a stream. first: number of the first one; skip: tokens of it that
    lie before the part; lengths: of each one's tokens in the part."""

    first: int
    skip: int
    lengths: NDArray[np.integer]


class DocumentLengths:
    """The documents of a file, end to end. lengths: tokens of each, any integers, shape (n,): there
    may be 10^8, so nothing here is as long as they are."""

    def __init__(self, lengths: NDArray[np.integer]) -> None:
        self.lengths = lengths
        starts = np.arange(0, len(lengths), _BLOCK)
        sums = [int(lengths[at : at + _BLOCK].sum(dtype=np.int64)) for at in starts.tolist()]
        self._ends = np.cumsum(sums, dtype=np.int64)

    @property
    def tokens(self) -> int:
        """Tokens of all."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def find(self, token: int) -> tuple[int, int]:
        """The document that a token is of, and its place there; behind the last: (n, 0)."""
        if token >= self.tokens:
            return len(self.lengths), 0
        block = int(np.searchsorted(self._ends, token, side="right"))
        at = block * _BLOCK
        ends = np.cumsum(self.lengths[at : at + _BLOCK], dtype=np.int64)
        inside = token - (int(self._ends[block - 1]) if block else 0)
        place = int(np.searchsorted(ends, inside, side="right"))
        return at + place, inside - (int(ends[place - 1]) if place else 0)

    def slice(self, start: int, end: int) -> DocumentSlice:
        """The documents of tokens [start, end), at least one of them."""
        first, skip = self.find(start)
        last, _ = self.find(end - 1)
        lengths = self.lengths[first : last + 1].copy()
        lengths[0] -= skip
        lengths[-1] -= int(lengths.sum(dtype=np.int64)) - (end - start)
        return DocumentSlice(first, skip, lengths)

    def parts(self, cut: Cut, *, target: int) -> Iterator[StreamPart]:
        """Shards of about `target` tokens that hold whole pieces, each once."""
        total, begin = self.tokens, 0
        count = max(1, round(total / target))
        for number in range(1, count + 1):
            border, halo = self._border(total * number // count, cut)
            if border > begin:
                yield StreamPart(begin, border + halo, 0)
                begin = border

    def _border(self, token: int, cut: Cut) -> tuple[int, int]:
        """Where a piece begins, at or before a token, and what the one before it has beyond."""
        document, offset = self.find(token)
        if document == len(self.lengths):
            return self.tokens, 0
        count = int(piece_counts(self.lengths[document : document + 1], cut)[0])
        nth = min(offset // cut.stride, count - 1)
        return token - offset + nth * cut.stride, (cut.length - cut.stride) if nth else 0


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequences:
    """Which pieces make up which sequence. pieces: their numbers, sequence by sequence, int64,
    shape (pieces,); bounds: where each sequence's begin, and the end, int64, shape (n + 1,)."""

    pieces: Ints
    bounds: Ints

    def __len__(self) -> int:
        return len(self.bounds) - 1


def pack_pieces(lengths: Ints, *, room: int) -> PackedSequences:
    """Pack pieces into sequences of `room` tokens. lengths: of each, 1 to room, shape (pieces,).

    Sequences stand in the order of their first pieces, and pieces of a sequence in the order of a
    hash of their numbers, as that of their lengths would teach a model what comes last.
    """
    if not len(lengths):
        return PackedSequences(np.empty(0, np.int64), np.zeros(1, np.int64))
    hashes = _hashes(len(lengths))
    # The longest first; of one length by the hash, so that neighbours part.
    order = np.lexsort((hashes, -lengths))
    bins = np.empty(len(lengths), np.int64)
    bins[order] = first_fit(lengths[order], room)
    # A sequence's number follows its first piece, not when it was opened.
    first = np.full(int(bins.max()) + 1, len(lengths), np.int64)
    np.minimum.at(first, bins, np.arange(len(lengths)))
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    bins = number[bins]
    counts = np.bincount(bins, minlength=len(first))
    bounds = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return PackedSequences(np.lexsort((hashes, bins)), bounds)


def first_fit(lengths: Ints, room: int) -> Ints:
    """The bin of each piece, by first fit. lengths: descending."""
    borders = np.flatnonzero(np.diff(lengths)) + 1
    begins = np.concatenate(([0], borders))
    ends = np.concatenate((borders, [len(lengths)]))
    runs = _RoomRuns()
    found = [
        runs.put(int(length), int(count), room)
        for length, count in zip(lengths[begins].tolist(), (ends - begins).tolist(), strict=True)
    ]
    return np.concatenate(found)


class _RoomRuns:
    """Bins in the order in which they were opened, as runs of the same room left."""

    def __init__(self) -> None:
        self._firsts = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._rooms = np.empty(0, np.int64)
        self._opened = 0

    def put(self, length: int, count: int, room: int) -> Ints:
        """The bins of so many pieces of one length, int64, shape (count,)."""
        each = self._rooms // length
        sums = np.cumsum(each * self._counts)
        here = int(np.searchsorted(sums, count))  # the run that takes the last piece
        if here == len(sums):
            more = count - (int(sums[-1]) if len(sums) else 0)
            self._open(-(-more // (room // length)), room)
            each = np.append(each, room // length)
        used = np.flatnonzero(each[: here + 1])
        bins = number_ranges(self._firsts[used], self._counts[used])
        taken = np.repeat(bins, np.repeat(each[used], self._counts[used]))[:count]
        full, last = int(taken[-1]) if count else 0, here
        in_last = count - int(np.searchsorted(taken, full))
        self._rooms[: last + 1] -= each[: last + 1] * length
        self._split(last, full, each=int(each[last]), in_last=in_last, length=length)
        if len(self._rooms) > 64:  # what has no room for the shortest is never asked again
            kept = self._rooms > 0
            if not kept.all():
                self._firsts, self._counts = self._firsts[kept], self._counts[kept]
                self._rooms = self._rooms[kept]
        return taken

    def _open(self, count: int, room: int) -> None:
        self._firsts = np.append(self._firsts, self._opened)
        self._counts = np.append(self._counts, count)
        self._rooms = np.append(self._rooms, room)
        self._opened += count

    def _split(self, run: int, full: int, *, each: int, in_last: int, length: int) -> None:
        """Give back what the last run's bins behind bin `full` have not got, nor that one all."""
        first, count, left = (int(c[run]) for c in (self._firsts, self._counts, self._rooms))
        parts = [(first, full - first, left), (full, 1, left + (each - in_last) * length)]
        parts.append((full + 1, first + count - full - 1, left + each * length))
        parts = [part for part in parts if part[1]]
        for name, place in (("_firsts", 0), ("_counts", 1), ("_rooms", 2)):
            old, new = getattr(self, name), [part[place] for part in parts]
            setattr(self, name, np.concatenate((old[:run], new, old[run + 1 :])).astype(np.int64))


def _hashes(count: int) -> NDArray[np.uint64]:
    """A number for each piece that looks random: splitmix64 (Steele, Lea, Flood, Fast splittable
    pseudorandom number generators, 2014) of its own."""
    with np.errstate(over="ignore"):
        x = (np.arange(count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_LENGTHS = ("uint8", "uint16", "uint32", "int64")
_MOST = 2**48


def _no_documents() -> NDArray[np.integer]:
    return np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenNotes:
    """One shard of tokens.

    dtype: numpy's `dtype.str` of the file; cut: of sequences; documents: how these go with them;
    vocabulary: ids are below; None: they aren't checked. name: of the file; token: its number of
    the shard's first. first_document: among the dataset's; skip: tokens of that which lie before
    the shard; lengths: of each document's part in it; none of a file that doesn't tell documents.
    """

    dtype: str
    cut: Cut
    documents: DocumentMode
    vocabulary: int | None
    name: str
    token: int
    first_document: int = 0
    skip: int = 0
    lengths: NDArray[np.integer] = field(default_factory=_no_documents)

    def to_bytes(self) -> bytes:
        """As a sidecar has them: a line of JSON, then the lengths in as few bytes as they need."""
        kind = np.min_scalar_type(int(self.lengths.max())).name if len(self.lengths) else "uint8"
        kind = kind if kind in _LENGTHS else "int64"
        told = {
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
        head = json.dumps(told).encode()
        return head + b"\n" + self.lengths.astype(np.dtype(kind).newbyteorder("<")).tobytes()

    @classmethod
    def from_bytes(cls, notes: bytes) -> TokenNotes:
        """What a sidecar says, which may come from anybody. Raises ValueError."""
        head, _, rest = notes.partition(b"\n")
        told: Any = json.loads(head)
        counts = [told[name] for name in ("token", "first_document", "skip")]
        vocabulary = told["vocabulary"]
        length, stride = told["cut"]
        numbers = [length, stride, *counts, *([] if vocabulary is None else [vocabulary])]
        if not all(type(each) is int and 0 <= each <= _MOST for each in numbers):
            raise ValueError("numbers that can't be")
        if told["lengths"] not in _LENGTHS or not length or not stride:
            raise ValueError("a cut or lengths that can't be")
        if told["documents"] not in ("across", "within", "pack"):
            raise ValueError("documents that can't be")
        dtype = np.dtype(told["dtype"])
        if dtype.kind not in "iu" or not isinstance(told["name"], str):
            raise ValueError("a dtype or a name that can't be")
        lengths = np.frombuffer(rest, np.dtype(told["lengths"]).newbyteorder("<"))
        if len(lengths) and (int(lengths.min()) < 0 or int(lengths.max()) > _MOST):
            raise ValueError("documents that can't be")
        return cls(
            dtype=dtype.str,
            cut=Cut(length, stride),
            documents=told["documents"],
            vocabulary=vocabulary,
            name=told["name"],
            token=told["token"],
            first_document=told["first_document"],
            skip=told["skip"],
            lengths=lengths,
        )
