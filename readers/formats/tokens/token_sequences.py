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

    Ints = NDArray[np.int64]

TOKENS, DOCUMENT, POSITION = "tokens", "document", "position"
"""The fields of a sample. The last two exist if the documents are known."""

UNCUT = 2**40
"""The length of a sequence that stands for documents that aren't cut."""


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


def find_document(bounds: Ints, token: int) -> tuple[int, int]:
    """Return the document that contains a token, and the token's position in it; (n, 0) for the
    end of the last document.

    bounds: the first token of each document of a file, and the end of the last one, int64, shape (n
    + 1,). There may be 10^8 documents.
    """
    document = int(np.searchsorted(bounds, token, side="right")) - 1
    return document, token - int(bounds[document])


def slice_documents(bounds: Ints, start: int, end: int) -> DocumentSlice:
    """Return the documents of tokens [start, end), which must not be empty."""
    first, skip = find_document(bounds, start)
    last, _ = find_document(bounds, end - 1)
    inside = np.clip(bounds[first : last + 2], start, end)
    return DocumentSlice(first, skip, inside[1:] - inside[:-1])


def document_parts(bounds: Ints, cut: Cut, *, target: int) -> Iterator[StreamPart]:
    """Yield the shards of a file's documents, of about `target` tokens each; every piece of a
    document is in exactly one."""
    total, begin = int(bounds[-1]), 0
    count = max(1, round(total / target))
    for number in range(1, count + 1):
        # A border is the start of a piece; the piece before it may extend beyond that start.
        border, halo = total * number // count, 0
        document, offset = find_document(bounds, border)
        if document < len(bounds) - 1:
            pieces = int(piece_counts(np.diff(bounds[document : document + 2]), cut)[0])
            piece = min(offset // cut.stride, pieces - 1)
            border += piece * cut.stride - offset
            halo = (cut.length - cut.stride) if piece else 0
        if border > begin:
            yield StreamPart(begin, border + halo, 0)
            begin = border


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
