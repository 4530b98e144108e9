"""List the shards of a dataset of tokens, from the sizes of files and from .idx files."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from crc32c import crc32c

from penstock.cache import ConfigError, DatasetNotFoundError, ordered
from penstock.readers.fields import Array, Schema, Tokens, Value
from penstock.readers.files import printable
from penstock.readers.formats.candidates import PART_BYTES, Candidates
from penstock.readers.formats.dataset_arguments import EVERY, Sampling, given_types
from penstock.readers.formats.extents import ChunkedShard, Extents
from penstock.readers.formats.format import Snapshot
from penstock.readers.formats.tokens.token_files import TokenFile, find_files, inspect_token_file
from penstock.readers.formats.tokens.token_sequences import (
    UNCUT,
    Cut,
    DocumentSlice,
    StreamPart,
    TokenNotes,
    cut_documents,
    pack_pieces,
    piece_counts,
    sequence_count,
    stream_parts,
)
from penstock.readers.origin import left_out_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.readers.fields import FieldType
    from penstock.readers.formats.dataset_arguments import DocumentMode
    from penstock.readers.formats.format import Listing
    from penstock.readers.origin import LeftOut, Origin

_log = logging.getLogger("penstock")

TOKENS, DOCUMENT, POSITION = "tokens", "document", "position"
"""The fields of a sample; the last two where documents are known."""

# Shards grow with the dataset so that a few thousand sidecars tell all; those with documents less
# far, as an open one holds some 50 bytes for each.
_SHARDS, _MOST_BYTES, _MOST_BYTES_OF_DOCUMENTS = 2048, 2**30, 2**27
_MAX_PACKED = 2**24


class TokenIndexing:
    """How files of tokens get an index: they are looked at each time (name, size, time), and where
    any differs all are indexed anew."""

    keeps_facts: ClassVar[bool] = False

    def list(self, origin: Origin) -> TokenListing:
        """List the files. Raises DatasetNotFoundError, ConfigError, DatasetError, FetchError."""
        return TokenListing(origin)

    def is_current(
        self, origin: Origin, snapshot: Snapshot, listing: Callable[[], Listing]
    ) -> bool:
        """Whether these are the very files that were indexed."""
        del origin
        return listing().snapshot().fingerprint == snapshot.fingerprint


class TokenListing:
    """The files of tokens at a dataset's root, by name."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._pairs = find_files(origin)
        self._sampling = Sampling.of(origin.arrangement)
        self._documents = _documents(self._sampling, has_idx=self._pairs[0].idx is not None)
        self._cut = _cut(self._sampling, self._documents)
        self._schema = _schema(origin, self._cut, self._documents, self._pairs[0].idx is not None)

    def snapshot(self) -> Snapshot:
        """What an index notes of the files."""
        entries = [each for pair in self._pairs for each in (pair.data, pair.idx) if each]
        return Snapshot.of(entries, {})

    def candidates(self, *, workers: int) -> Candidates:
        """The shards, by headers and .idx files alone. Raises DatasetNotFoundError where no file
        holds a sequence."""

        def look(pair: object) -> TokenFile:
            return inspect_token_file(self._origin, pair, dtype=self._sampling.dtype)  # type: ignore[arg-type]

        files = list(ordered(look, self._pairs, workers=workers, ahead=workers + 2, name="list"))
        self._check_dtypes(files)
        total = sum(file.entry.size_bytes for file in files)
        has_documents = self._pairs[0].idx is not None
        most = _MOST_BYTES_OF_DOCUMENTS if has_documents else _MOST_BYTES
        target = min(most, max(PART_BYTES, total // _SHARDS))
        shards, first, left = list[ChunkedShard](), 0, 0
        for file in files:
            mine, rest = self._shards(file, target=target, first_document=first)
            shards += mine
            left += rest
            first += len(file.documents.lengths) if file.documents is not None else 0
        if not shards:
            raise DatasetNotFoundError(
                f"{self._origin.url}: its {len(files):,} files have {left:,} tokens, which aren't "
                f"one sequence of {self._cut.length:,} in any of them. Pass a smaller sample=."
            )
        if left:
            _log.info(
                "%s: %d tokens at the ends of %d files are left out, as they don't fill a sequence "
                "of %d",
                self._origin.url,
                left,
                len(files),
                self._cut.length,
            )
        return Candidates.of_chunks(self._schema, shards, unnamed=self._too_short(files))

    def _too_short(self, files: Sequence[TokenFile]) -> dict[str, LeftOut]:
        """The files with tokens of which no sample is made; of documents none is too short."""
        if self._documents != "across":
            return {}
        short = {
            file.entry.name: int(file.tokens > 0 and not sequence_count(file.tokens, self._cut))
            for file in files
        }
        return left_out_for(f"a file of less than one sequence ({self._cut.length:,})", short)

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """The same shard of the same files."""
        del name
        candidates = self.candidates(workers=workers)
        if len(candidates.chunked) == total:
            yield candidates, number

    def _check_dtypes(self, files: Sequence[TokenFile]) -> None:
        """Raise ConfigError where what is handed out can't hold what a file has."""
        given = given_types(self._origin.arrangement).get(TOKENS)
        for file in files:
            stored = np.dtype(file.dtype).newbyteorder("=")
            if stored == np.uint64:
                raise ConfigError(
                    f"{printable(file.entry.name)} is uint64, and tokens are handed out as int64. "
                    'Write it as int64; ids fit ("int64").'
                )
            wanted = np.dtype(getattr(given, "dtype", "int64"))
            if np.can_cast(stored, wanted, "safe"):
                continue
            vocabulary = self._sampling.vocabulary
            if vocabulary is None or vocabulary - 1 > np.iinfo(wanted).max:
                raise ConfigError(
                    f'schema["{TOKENS}"]: {wanted} can\'t hold all that '
                    f"{printable(file.entry.name)} may have, which is {stored}. Pass a wider "
                    "dtype, or vocabulary= below its end."
                )

    def _shards(
        self, file: TokenFile, *, target: int, first_document: int
    ) -> tuple[list[ChunkedShard], int]:
        """The shards of one file, and how many of its tokens are in none."""
        cut, itemsize = self._cut, np.dtype(file.dtype).itemsize
        if self._documents == "across" or file.documents is None:
            parts = list(stream_parts(file.tokens, cut, target=max(1, target // itemsize)))
            count = sequence_count(file.tokens, cut)
            # With strides beyond the length there are gaps, which aren't an end.
            used = (count - 1) * cut.stride + cut.length if count else 0
            rest = file.tokens - used
        else:
            parts = list(file.documents.parts(cut, target=max(1, target // itemsize)))
            rest = 0
        told = (self._shard(file, part, first_document=first_document) for part in parts)
        return [shard for shard in told if shard is not None], rest

    def _shard(
        self, file: TokenFile, part: StreamPart, *, first_document: int
    ) -> ChunkedShard | None:
        itemsize = np.dtype(file.dtype).itemsize
        first, skip, lengths = DocumentSlice(0, 0, np.empty(0, np.uint8))
        if file.documents is not None:
            first, skip, lengths = file.documents.slice(part.start, part.end)
        notes = TokenNotes(
            dtype=file.dtype,
            cut=self._cut,
            documents=self._documents,
            vocabulary=self._sampling.vocabulary,
            name=printable(file.entry.name),
            token=part.start,
            first_document=first_document + first,
            skip=skip,
            lengths=lengths,
        ).to_bytes()
        samples = part.sequences
        if self._documents == "within":
            samples = int(piece_counts(lengths, self._cut).sum())
        elif self._documents == "pack":
            samples = len(
                pack_pieces(cut_documents(lengths, self._cut).lengths, room=self._cut.length)
            )
        if not samples:  # of empty documents
            return None
        start, size = file.start + part.start * itemsize, (part.end - part.start) * itemsize
        identity = [printable(file.entry.name), file.entry.size_bytes, file.checksum, start, size]
        return ChunkedShard(
            samples=samples,
            files=[file.entry],
            extents=Extents(
                files=np.zeros(1, np.int64),
                starts=np.array([start], np.int64),
                sizes=np.array([size], np.int64),
                fields=np.zeros(1, np.int64),
            ),
            checksum=crc32c(notes, crc32c(json.dumps(identity).encode())),
            notes=notes,
        )


def _documents(sampling: Sampling, *, has_idx: bool) -> DocumentMode:
    """How sequences go with documents: what is asked for, else across, or whole documents where
    nobody says how long a sequence is."""
    told = sampling.documents
    if told is None:
        told = "within" if has_idx and sampling.window(TOKENS) is None else "across"
    if told != "across" and not has_idx:
        raise ConfigError(
            f'documents: got "{told}", and flat files of tokens don\'t tell where documents end; a '
            "Megatron .idx beside each .bin does. Leave documents= out to run across them."
        )
    return told


def _cut(sampling: Sampling, documents: DocumentMode) -> Cut:
    window, step = sampling.window(TOKENS), sampling.step(TOKENS)
    others = {name for name in (*sampling.sample, *sampling.stride)} - {EVERY, TOKENS}
    if others:
        raise ConfigError(f'sample: got {sorted(others)}, and the field is "{TOKENS}".')
    if window is None:
        if documents == "within":
            return Cut(UNCUT, UNCUT)
        raise ConfigError(
            f'sample: how long is a sequence? Pass sample=(2048,), for documents="{documents}".'
        )
    if len(window) != 1 or window[0] is None or (step is not None and len(step) != 1):
        raise ConfigError(f"sample: got {window}, stride {step}; wanted one length: (2048,).")
    length = window[0]
    stride = length if step is None or step[0] is None else step[0]
    if documents != "across" and stride > length:
        raise ConfigError(
            f"stride: got {stride:,}, and sequences have {length:,} tokens: documents would lack "
            f'what lies between. Wanted at most {length:,} with documents="{documents}".'
        )
    if length >= UNCUT or (documents == "pack" and length > _MAX_PACKED):
        raise ConfigError(f"sample: got a length of {length:,}, which is too long.")
    return Cut(length, stride)


def _schema(origin: Origin, cut: Cut, documents: DocumentMode, has_idx: bool) -> Schema:
    """The fields. The user may say what tokens are handed out as."""
    given = given_types(origin.arrangement)
    others = set(given) - {TOKENS}
    told: FieldType | None = given.get(TOKENS)
    if others or not isinstance(told, Tokens | Array | None):
        raise ConfigError(
            f'schema: got {given}, and one type can be said here: {{"{TOKENS}": Tokens("int32")}}, '
            "what tokens are handed out as."
        )
    if origin.arrangement.places or origin.arrangement.manifest is not None:
        raise ConfigError(f"{origin.url}: files of tokens take no manifest= and no places.")
    dtype = told.dtype if isinstance(told, Tokens | Array) and told.dtype != "auto" else "int64"
    if np.dtype(dtype).kind not in "iu":
        raise ConfigError(f'schema["{TOKENS}"]: got {told!r}, and tokens are integers.')
    fields: dict[str, FieldType] = {
        TOKENS: Tokens(dtype) if documents == "within" else Array(dtype, (cut.length,))
    }
    if documents == "within":
        fields |= {DOCUMENT: Value("int64"), POSITION: Value("int64")}
    elif has_idx:
        number = "int32" if documents == "pack" else "int64"
        fields |= {DOCUMENT: Array(number, (cut.length,)), POSITION: Array("int64", (cut.length,))}
    return Schema(fields)
