"""Describe what each part of a mixture gives in an epoch: samples, tokens, own epochs, bytes.

All counts are those of the mixture's stream, so they are exact. Tokens are known of samples of one
length; of others the mean length is known, from some of the samples if the part has many.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.cache.base import format_size
from penstock.readers.fieldtypes import Tokens

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from penstock.readers.fieldtypes import Schema
    from penstock.readers.mixtures import MixtureStream
    from penstock.readers.sources import MixtureContents, Source

TOKEN_NAMES = ("tokens", "input_ids")
"""Fields of integers along one axis that are tokens, if their type doesn't say so."""

_COUNTED = 2**14  # samples whose lengths give the mean of a part


class TokenLengths(NamedTuple):
    """The mean number of tokens of a source's samples. is_fixed: every sample has as many."""

    mean: float
    is_fixed: bool


def fixed_tokens(schema: Schema, fields: Sequence[str]) -> int | None:
    """Return the tokens of each sample if all have as many; None for other data."""
    for name in fields:
        type = schema.get(name)
        form = None if type is None or name not in TOKEN_NAMES else type.form
        if form is not None and form.dtype.kind in "iu" and len(form.shape) == 1:
            return None if form.is_ragged else int(form.fixed_shape[0])
    return None


def token_lengths(source: Source, *, names: Container[str] | None = None) -> TokenLengths | None:
    """Return the mean number of tokens of a source's samples; None if it delivers no tokens.

    They are those of its field of `Tokens`, else of its integers along one axis; names: that these
    may have, None for any. Samples of different lengths are counted from tables, at most 16,384 of
    them. Raises the errors of reading these.
    """
    schema = source.schema
    forms = {name: schema[name].form for name in source.fields if name in schema}
    found = [
        (not isinstance(schema[name], Tokens), number, name, form)
        for number, (name, form) in enumerate(forms.items())
        if form is not None and form.dtype.kind in "iu" and len(form.shape) == 1
        if isinstance(schema[name], Tokens) or names is None or name in names
    ]
    if not found:
        return None
    *_, field, form = min(found)
    if not form.is_ragged:  # sequences that are cut or packed to one length
        return TokenLengths(float(math.prod(form.fixed_shape)), is_fixed=True)
    samples = source.contents.samples
    places = np.unique(np.linspace(0, samples - 1, min(samples, _COUNTED)).astype(np.int64))
    lengths = source.lengths(field, source.contents.rows(places))
    return TokenLengths(float(lengths.mean()), is_fixed=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSummary:
    """The samples that one part of a mixture delivers in an epoch of it.

    share: integer share of the positions where the epoch begins; weight: the same as a fraction,
    rounded to 8 decimals. size: samples of the part; samples: those that the epoch delivers,
    repeats counted. epochs: of the part itself, samples / size, or by the sum of its samples'
    weights. least_repeats, most_repeats: how often the epoch delivers each sample. tokens: of the
    delivered samples; None if the part delivers none; tokens_are_exact: False if they follow from a
    mean. bytes: in the files, of the delivered samples; stored_bytes: of all files of the part.
    """

    name: str
    share: int
    weight: float
    size: int
    samples: int
    epochs: float
    least_repeats: int
    most_repeats: int
    tokens: int | None
    tokens_are_exact: bool
    bytes: int
    stored_bytes: int

    def texts(self) -> tuple[str, ...]:
        """Return the columns of the part in `MixtureSummary.rows`."""
        least, most = self.least_repeats, self.most_repeats
        return (
            self.name,
            f"{100 * self.weight:.6g} %",
            f"{self.samples:,}",
            f"{self.size:,}",
            f"{self.epochs:.3g}",
            str(least) if least == most else f"{least} to {most}",
            _tokens(self.tokens, self.tokens_are_exact),
            format_size(self.bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSummary:
    """The samples that each part of a mixture delivers in one epoch; `str` is a table of them.

    epoch: its number. samples: of the epoch. tokens: of all parts; None if one of them has none.
    bytes: in the files, of the delivered samples.
    """

    epoch: int
    samples: int
    tokens: int | None
    bytes: int
    parts: tuple[PartSummary, ...]

    HEADS = ("part", "share", "samples", "of", "own epochs", "each sample", "tokens", "bytes")

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the columns of each part, and of all of them, for people; `HEADS` names them."""
        for part in self.parts:
            yield part.texts()
        exact = all(part.tokens_are_exact for part in self.parts)
        size = sum(part.size for part in self.parts)
        total = f"{self.samples:,}", f"{size:,}", "", "", _tokens(self.tokens, exact)
        yield ("all", "100 %", *total, format_size(self.bytes))

    def values(self) -> dict[str, Any]:
        """Return all figures as JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [self.HEADS, *self.rows()]
        first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
        texts = ([each.rjust(n) for each, n in zip(row[1:], others, strict=True)] for row in rows)
        pairs = zip(rows, texts, strict=True)
        return "\n".join("  ".join((row[0].ljust(first), *more)).rstrip() for row, more in pairs)


def summarise(
    of: MixtureContents, sources: Sequence[Source], stream: MixtureStream, samples: int, epoch: int
) -> MixtureSummary:
    """Return what the parts give in an epoch. stream: of the job. samples: of an epoch of it."""
    first = epoch * samples
    before, after = stream.counts(first), stream.counts(first + samples)
    shares = stream.weights_at(first).shares
    parts = []
    for number, (name, source) in enumerate(zip(of.names, sources, strict=True)):
        weight = float(shares[number] / shares.sum())
        contents, tokens = of.parts[number], token_lengths(source, names=TOKEN_NAMES)
        begin, end, size = int(before[number]), int(after[number]), contents.samples
        length = int(of.lengths[number])
        least, most = _repeats(begin, end, length)
        if (weights := contents.weights) is not None:
            of_epoch = weights.slots(weights.first, weights.samples).least_and_most
            least, most = least * of_epoch[0], most * of_epoch[1]
        count = end - begin
        parts.append(
            PartSummary(
                name=name,
                share=int(shares[number]),
                weight=round(weight, 8) or weight,  # integer shares change it by up to 2^-31
                size=size,
                samples=count,
                epochs=count / length,
                least_repeats=least,
                most_repeats=most,
                tokens=None if tokens is None else round(tokens.mean * count),
                tokens_are_exact=tokens is not None and tokens.is_fixed,
                bytes=round(contents.sample_bytes * count),
                stored_bytes=int(contents.shard_bytes.sum()),
            )
        )
    known = [part.tokens for part in parts if part.tokens is not None]
    return MixtureSummary(
        epoch=epoch,
        samples=samples,
        tokens=sum(known) if len(known) == len(parts) else None,
        bytes=sum(part.bytes for part in parts),
        parts=tuple(parts),
    )


def _repeats(begin: int, end: int, size: int) -> tuple[int, int]:
    """Return the least and the largest number of times that [begin, end) of a part's stream
    delivers a sample of it: each of its epochs has all samples once."""
    first, last = -(-begin // size), end // size  # complete epochs
    if first > last:  # within one epoch
        return 0, int(end > begin)
    cut = (begin % size > 0) + (end % size > 0)
    return last - first, last - first + cut


def _tokens(tokens: int | None, is_exact: bool) -> str:
    return "-" if tokens is None else f"{'' if is_exact else 'about '}{tokens:,}"
