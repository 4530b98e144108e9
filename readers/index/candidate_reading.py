"""Read candidates ahead on threads, in bounded batches, and pass them to the checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import ordered
from penstock.readers.fields import (
    Array,
    Boxes,
    BoxUnits,
    DenseColumn,
    Keypoints,
    RaggedColumn,
    array_form,
    bare_facts,
    check_masks,
    examine,
)
from penstock.readers.formats import read_candidates
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields import ArrayForm, Checked, Column
    from penstock.readers.formats import Candidates, Contents
    from penstock.readers.origin import Origin
    from penstock.readers.types import Encoded, Facts, Verify

# Enough images for every core of a large machine to have some, and little enough that a few chunks
# in flight are tens of megabytes.
_CHUNK_BYTES = 32 * 2**20
_CHUNK_SAMPLES = 256
_AHEAD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateBatch:
    """Some candidates of one shard. positions: int64, shape (n,); contents: by span field, bytes or
    a reason of each, None where it lacks the field; masks: what was told of those."""

    shard: int
    positions: NDArray[np.int64]
    contents: Contents
    masks: Checked

    def examine(
        self, candidates: Candidates, verify: Verify | None, rows: Sequence[int] | None = None
    ) -> list[Mapping[str, Facts] | Rejection]:
        """Check samples wholly; only some rows of the chunk, if asked. verify: decodes images, None
        where there are none."""
        here = range(len(self.positions)) if rows is None else rows
        if not self.contents:
            return [{} for _ in here]
        bare = {name: spans.codec for name, spans in candidates.spans.items() if spans.codec}
        samples = {
            name: [each[row] for row in here]
            for name, each in self.contents.items()
            if name not in bare
        }
        positions = self.positions[list(here)].tolist()
        noted = noted_values(candidates, positions)
        found: list[Mapping[str, Facts] | Rejection] = [{}] * len(here)
        if samples:
            masks = {name: [each[row] for row in here] for name, each in self.masks.items()}
            found = examine(
                samples,
                candidates.schema,
                verify,
                noted=noted,
                masks=masks,
                max_pixels=candidates.max_pixels,
            )
        for name, codec in bare.items():
            values = [self.contents[name][row] for row in here]
            form = array_form(candidates.schema[name])
            assert form is not None, name
            found = [
                _with_bare(name, facts, value, form, codec)
                for facts, value in zip(found, values, strict=True)
            ]
        return found


def _with_bare(
    name: str,
    facts: Mapping[str, Facts] | Rejection,
    data: Encoded | Rejection | None,
    form: ArrayForm,
    codec: str,
) -> Mapping[str, Facts] | Rejection:
    """A sample's facts and those of a field that is bare numbers."""
    if isinstance(facts, Rejection) or data is None:
        return facts
    if isinstance(data, Rejection):
        return data
    found = bare_facts(data, form, codec)
    return found if isinstance(found, Rejection) else {**facts, name: found}


def check_units(candidates: Candidates) -> None:
    """Raise DatasetError where all boxes of tables have another unit than their format says. Those
    of files are compared when they are read."""
    for name, type in candidates.schema.of_type(Boxes).items():
        if name in candidates.values:
            every = noted_values(candidates, range(len(candidates)))[name]
            given = [each for each in every if each is not None]
            if given:
                BoxUnits(enough=1).see(name, type, np.concatenate(given))


def noted_values(
    candidates: Candidates, positions: Sequence[int]
) -> dict[str, list[NDArray[np.generic] | None]]:
    """What is noted of candidates and has to fit their images: boxes, points, and what belongs to
    boxes; None where they lack it."""
    return {
        name: [
            _sample(column, position) if there is None or there[position] else None
            for position in positions
        ]
        for name, column in candidates.values.items()
        if isinstance(type := candidates.schema[name], Boxes | Keypoints)
        or (isinstance(type, Array) and type.of is not None)
        for there in (candidates.present.get(name),)
    }


def _sample(column: Column, position: int) -> NDArray[np.generic]:
    if isinstance(column, RaggedColumn):
        return column.sample(position)
    assert isinstance(column, DenseColumn)
    found: NDArray[np.generic] = column.values[position]
    return found


def cut_into_batches(sizes: NDArray[np.int64]) -> Iterator[slice]:
    """Cut a list into slices of at most 256 samples and 32 MiB (or one sample). sizes: bytes, shape
    (n,)."""
    start, slice_bytes = 0, 0
    for i, size_bytes in enumerate(sizes.tolist()):
        if i > start and (slice_bytes + size_bytes > _CHUNK_BYTES or i - start == _CHUNK_SAMPLES):
            yield slice(start, i)
            start, slice_bytes = i, 0
        slice_bytes += size_bytes
    if start < len(sizes):
        yield slice(start, len(sizes))


def read_candidate_batches(
    origin: Origin,
    candidates: Candidates,
    shards: Iterator[tuple[int, NDArray[np.int64]]],
    *,
    workers: int,
) -> Iterator[CandidateBatch]:
    """Read the chunks of shards' candidates, in order.

    shards: (number, positions). Raises what `read_candidates` raises.
    """
    sizes = candidates.sizes

    def pieces() -> Iterator[tuple[int, NDArray[np.int64]]]:
        for shard, positions in shards:
            for some in cut_into_batches(sizes[positions]):
                yield shard, positions[some]

    def read(piece: tuple[int, NDArray[np.int64]]) -> CandidateBatch:
        shard, positions = piece
        contents = read_candidates(origin, candidates, positions)
        masks = check_masks(contents, candidates.schema, max_pixels=candidates.max_pixels)
        return CandidateBatch(shard=shard, positions=positions, contents=contents, masks=masks)

    yield from ordered(read, pieces(), workers=workers, ahead=_AHEAD + workers, name="intake")
