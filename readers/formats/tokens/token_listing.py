"""List the shards of a dataset of tokens from the sizes of its files and from .idx files."""

from __future__ import annotations

import json
import logging
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from penstock.cache import ConfigError, DatasetNotFoundError, ordered
from penstock.readers.fieldtypes import Array, Schema, Tokens, Value
from penstock.readers.files import printable
from penstock.readers.formats.candidates import PART_BYTES
from penstock.readers.formats.chunked import ChunkedDataset
from penstock.readers.formats.dataset_arguments import ALL_FIELDS, Sampling, given_types
from penstock.readers.formats.extents import ChunkedShard, Extents
from penstock.readers.formats.tokens.token_files import inspect_token_file
from penstock.readers.formats.tokens.token_sequences import (
    DOCUMENT,
    POSITION,
    TOKENS,
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
    from collections.abc import Sequence

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats.dataset_arguments import DocumentMode
    from penstock.readers.formats.tokens.token_files import TokenFile, TokenFilePair
    from penstock.readers.origin import LeftOut, Origin

_log = logging.getLogger("penstock")

# Shards grow with the dataset, so that a few thousand sidecars suffice. Shards with documents grow
# less, because an open one holds about 50 bytes for each document.
_MANY_SHARDS, _MAX_SHARD_BYTES, _MAX_DOCUMENT_SHARD_BYTES = 2048, 2**30, 2**27
_MAX_PACKED_LENGTH = 2**24


class TokenListing:
    """The files of tokens at a dataset's root, sorted by name."""

    def __init__(self, origin: Origin, pairs: Sequence[TokenFilePair]) -> None:
        self._origin, self._pairs = origin, pairs
        self._sampling = Sampling.of(origin.arrangement)
        self._documents = _documents(self._sampling, has_idx=self._pairs[0].idx is not None)
        self._cut = _cut(self._sampling, self._documents)
        self._schema = _schema(origin, self._cut, self._documents, self._pairs[0].idx is not None)

    def dataset(self, *, workers: int) -> ChunkedDataset:
        """Read headers and .idx files, and return the shards.

        Raises DatasetNotFoundError if no file holds a sequence.
        """
        inspect = partial(inspect_token_file, self._origin, dtype=self._sampling.dtype)
        files = list(ordered(inspect, self._pairs, workers=workers, ahead=workers + 2, name="list"))
        self._check_dtypes(files)
        total = sum(file.entry.size_bytes for file in files)
        has_documents = self._pairs[0].idx is not None
        most = _MAX_DOCUMENT_SHARD_BYTES if has_documents else _MAX_SHARD_BYTES
        target = min(most, max(PART_BYTES, total // _MANY_SHARDS))
        shards, first, left = list[ChunkedShard](), 0, 0
        for file in files:
            of_file, rest = self._shards(file, target=target, first_document=first)
            shards += of_file
            left += rest
            first += len(file.documents.lengths) if file.documents is not None else 0
        if not shards:
            raise DatasetNotFoundError(
                f"{self._origin.url}: its {len(files):,} files have {left:,} tokens, and none of "
                f"them fills one sequence of {self._cut.length:,}. Pass a smaller sample=."
            )
        if left:
            _log.info(
                "%s: %d tokens at the ends of %d files are left out, because they don't fill a "
                "sequence of %d",
                self._origin.url,
                left,
                len(files),
                self._cut.length,
            )
        return ChunkedDataset(schema=self._schema, shards=shards, unnamed=self._too_short(files))

    def _too_short(self, files: Sequence[TokenFile]) -> dict[str, LeftOut]:
        """Return the files with tokens that don't fill one sequence. A file with documents is never
        too short."""
        if self._documents != "across":
            return {}
        short = {
            file.entry.name: int(file.tokens > 0 and not sequence_count(file.tokens, self._cut))
            for file in files
        }
        return left_out_for(f"a file of less than one sequence ({self._cut.length:,})", short)

    def _check_dtypes(self, files: Sequence[TokenFile]) -> None:
        """Raise ConfigError if the dtype of delivered tokens can't hold all ids of a file."""
        given = given_types(self._origin.arrangement).get(TOKENS)
        for file in files:
            stored = np.dtype(file.dtype).newbyteorder("=")
            if stored == np.uint64:
                raise ConfigError(
                    f"{printable(file.entry.name)} is uint64, and tokens are delivered as int64. "
                    "Write the file as int64."
                )
            wanted = np.dtype(getattr(given, "dtype", "int64"))
            if np.can_cast(stored, wanted, "safe"):
                continue
            vocabulary = self._sampling.vocabulary
            if vocabulary is None or vocabulary - 1 > np.iinfo(wanted).max:
                raise ConfigError(
                    f'schema["{TOKENS}"]: {wanted} can\'t hold all values of {stored}, the dtype '
                    f"of {printable(file.entry.name)}. Pass a wider dtype, or a vocabulary= whose "
                    f"ids fit into {wanted}."
                )

    def _shards(
        self, file: TokenFile, *, target: int, first_document: int
    ) -> tuple[list[ChunkedShard], int]:
        """Return the shards of one file, and how many of its tokens are in no shard."""
        cut, itemsize = self._cut, np.dtype(file.dtype).itemsize
        if self._documents == "across" or file.documents is None:
            parts = list(stream_parts(file.tokens, cut, target=max(1, target // itemsize)))
            count = sequence_count(file.tokens, cut)
            # Tokens between sequences (stride > length) don't count as left out at the end.
            used = (count - 1) * cut.stride + cut.length if count else 0
            rest = file.tokens - used
        else:
            parts = list(file.documents.parts(cut, target=max(1, target // itemsize)))
            rest = 0
        shards = (self._shard(file, part, first_document=first_document) for part in parts)
        return [shard for shard in shards if shard is not None], rest

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
        if not samples:  # all its documents are empty
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
            note=notes,
        )


def _documents(sampling: Sampling, *, has_idx: bool) -> DocumentMode:
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
    others = {name for name in (*sampling.sample, *sampling.stride)} - {ALL_FIELDS, TOKENS}
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
    if length >= UNCUT or (documents == "pack" and length > _MAX_PACKED_LENGTH):
        most = _MAX_PACKED_LENGTH if documents == "pack" else UNCUT - 1
        raise ConfigError(f"sample: got a length of {length:,}, expected at most {most:,}.")
    return Cut(length, stride)


def _schema(origin: Origin, cut: Cut, documents: DocumentMode, has_idx: bool) -> Schema:
    """Return the fields. The user may choose the dtype of delivered tokens."""
    given = given_types(origin.arrangement)
    type = given.get(TOKENS)
    if set(given) - {TOKENS} or not isinstance(type, Tokens | Array | None):
        raise ConfigError(
            f'schema: got {given}, expected only the type of the tokens: {{"{TOKENS}": '
            'Tokens("int32")}.'
        )
    if origin.arrangement.places or origin.arrangement.manifest is not None:
        raise ConfigError(
            f"{origin.url}: a dataset of tokens takes neither manifest= nor paths in fields=."
        )
    dtype = type.dtype if isinstance(type, Tokens | Array) and type.dtype != "auto" else "int64"
    if np.dtype(dtype).kind not in "iu":
        raise ConfigError(
            f'schema["{TOKENS}"]: got {type!r}, expected an integer dtype: tokens are integers.'
        )
    fields: dict[str, FieldType] = {
        TOKENS: Tokens(dtype) if documents == "within" else Array(dtype, (cut.length,))
    }
    if documents == "within":
        fields |= {DOCUMENT: Value("int64"), POSITION: Value("int64")}
    elif has_idx:
        number = "int32" if documents == "pack" else "int64"
        fields |= {DOCUMENT: Array(number, (cut.length,)), POSITION: Array("int64", (cut.length,))}
    return Schema(fields)
