"""Describe the shards of a dataset of tokens, from the sizes of its files and from .idx files."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
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
from penstock.readers.formats.extents import ChunkedShard
from penstock.readers.formats.tokens.token_files import inspect_token_file
from penstock.readers.formats.tokens.token_sequences import (
    DOCUMENT,
    POSITION,
    TOKENS,
    UNCUT,
    Cut,
    DocumentSlice,
    TokenNotes,
    cut_documents,
    document_parts,
    pack_pieces,
    piece_counts,
    sequence_count,
    slice_documents,
    stream_parts,
)
from penstock.readers.origin import left_out_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats.dataset_arguments import DocumentMode
    from penstock.readers.formats.tokens.token_files import TokenFile, TokenFilePair
    from penstock.readers.origin import Origin

_log = logging.getLogger("penstock")

# Shards grow with the dataset, so that a few thousand sidecars suffice. Shards with documents grow
# less, because an open one holds about 50 bytes for each document.
_MANY_SHARDS, _MAX_SHARD_BYTES, _MAX_DOCUMENT_SHARD_BYTES = 2048, 2**30, 2**27
_MAX_PACKED_LENGTH = 2**24


def index_tokens(origin: Origin, pairs: Sequence[TokenFilePair], *, workers: int) -> ChunkedDataset:
    """Read headers and .idx files, and return the shards.

    Raises ConfigError, DatasetError, FetchError, or DatasetNotFoundError if no file holds a
    sequence.
    """
    sampling = Sampling.of(origin.arrangement)
    has_idx = pairs[0].idx is not None
    documents = _document_mode(sampling, has_idx=has_idx)
    cut = _cut(sampling, documents)
    schema, dtype = _schema(origin, cut, documents, has_idx=has_idx)
    total = sum(pair.data.size_bytes for pair in pairs)
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
            f"{origin.url}: its {len(pairs):,} files have {left:,} tokens, and none of them fills "
            f"one sequence of {cut.length:,}. Pass a smaller sample=."
        )
    if left:
        _log.info(
            "%s: %d tokens at the ends of %d files are left out, because they don't fill a "
            "sequence of %d",
            origin.url,
            left,
            len(pairs),
            cut.length,
        )
    why = f"a file of less than one sequence ({cut.length:,})"
    return ChunkedDataset(schema=schema, shards=shards, unnamed=left_out_for(why, short))


def _shards(
    file: TokenFile, plan: TokenNotes, *, target: int, first_document: int
) -> Iterator[ChunkedShard]:
    """Yield the shards of a file. target: their bytes. first_document: its number in the
    dataset."""
    name, itemsize, cut = printable(file.entry.name), np.dtype(file.dtype).itemsize, plan.cut
    tokens = max(1, target // itemsize)
    parts = stream_parts(file.tokens, cut, target=tokens)
    if plan.documents != "across" and file.documents is not None:
        parts = document_parts(file.documents, cut, target=tokens)
    for part in parts:
        own, samples = DocumentSlice(0, 0, np.empty(0, np.uint8)), part.sequences
        if file.documents is not None:
            own = slice_documents(file.documents, part.start, part.end)
        if plan.documents == "within":
            samples = int(piece_counts(own.lengths, cut).sum())
        elif plan.documents == "pack":
            samples = len(pack_pieces(cut_documents(own.lengths, cut).lengths, room=cut.length))
        if not samples:  # all its documents are empty
            continue
        notes = replace(
            plan,
            dtype=file.dtype,
            name=name,
            token=part.start,
            first_document=first_document + own.first,
            skip=own.skip,
            lengths=own.lengths,
        ).to_bytes()
        start, size = file.start + part.start * itemsize, (part.end - part.start) * itemsize
        identity = [name, file.entry.size_bytes, file.checksum, start, size]
        yield ChunkedShard.of(
            [(file.entry, start, size, 0)],
            samples=samples,
            checksum=crc32c(notes, crc32c(json.dumps(identity).encode())),
            note=notes,
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
    given = given_types(origin.arrangement)
    type = given.get(TOKENS, Tokens())
    form = type.completed("int64", (None,)).form
    if set(given) - {TOKENS} or form is None:
        raise ConfigError(
            f'schema: got {given}, expected only the type of the tokens: {{"{TOKENS}": '
            'Tokens("int32")}.'
        )
    if origin.arrangement.places or origin.arrangement.manifest is not None:
        raise ConfigError(
            f"{origin.url}: a dataset of tokens takes neither manifest= nor paths in fields=."
        )
    dtype = form.dtype.name
    if form.dtype.kind not in "iu":
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
    return Schema(fields), dtype


def _check_dtype(file: TokenFile, wanted: str, vocabulary: int | None) -> None:
    """Raise ConfigError if the dtype of delivered tokens can't hold all ids of a file."""
    stored = np.dtype(file.dtype).newbyteorder("=")
    if stored == np.uint64:
        raise ConfigError(
            f"{printable(file.entry.name)} is uint64, and tokens are delivered as int64. "
            "Write the file as int64."
        )
    is_safe = np.can_cast(stored, wanted, "safe")
    if not is_safe and (vocabulary is None or vocabulary - 1 > np.iinfo(wanted).max):
        raise ConfigError(
            f'schema["{TOKENS}"]: {wanted} can\'t hold all values of {stored}, the dtype '
            f"of {printable(file.entry.name)}. Pass a wider dtype, or a vocabulary= whose "
            f"ids fit into {wanted}."
        )
