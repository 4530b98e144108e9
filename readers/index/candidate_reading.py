"""Read candidates ahead on threads, in bounded batches, and pass them to the checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import ordered
from penstock.readers.fieldtypes import (
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

    from penstock.readers.fieldtypes import Checked
    from penstock.readers.formats import Candidates, Contents
    from penstock.readers.origin import Origin
    from penstock.readers.types import Facts, Verify

    Ints = NDArray[np.int64]

# Enough images for every core of a large machine, and small enough that a few batches in flight
# take tens of megabytes.
_BATCH_BYTES = 32 * 2**20
_BATCH_SAMPLES = 256
_AHEAD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateBatch:
    """Some candidates of one shard. positions: int64, shape (n,). contents: by span field, the
    bytes or a rejection for each candidate, None if it lacks the field. masks: the results of the
    checks of masks."""

    shard: int
    positions: Ints
    contents: Contents
    masks: Checked

    def examine(
        self, candidates: Candidates, verify: Verify | None, rows: Sequence[int] | None = None
    ) -> list[Mapping[str, Facts] | Rejection]:
        """Check samples completely. rows: the rows of the batch to check, None means all. verify:
        decodes images; None if there are none."""
        rows = range(len(self.positions)) if rows is None else rows
        if not self.contents:
            return [{} for _ in rows]
        bare = {name: spans.codec for name, spans in candidates.spans.items() if spans.codec}
        samples = {
            name: [each[row] for row in rows]
            for name, each in self.contents.items()
            if name not in bare
        }
        noted = noted_values(candidates, self.positions[list(rows)].tolist())
        found: list[Mapping[str, Facts] | Rejection] = [{}] * len(rows)
        if samples:
            masks = {name: [each[row] for row in rows] for name, each in self.masks.items()}
            found = examine(
                samples,
                candidates.schema,
                verify,
                noted=noted,
                masks=masks,
                max_pixels=candidates.max_pixels,
            )
        for name, codec in bare.items():
            form = array_form(candidates.schema[name])
            assert form is not None, name
            for place, row in enumerate(rows):
                facts, data = found[place], self.contents[name][row]
                if isinstance(facts, Rejection) or data is None:
                    continue
                bare_numbers = (
                    data if isinstance(data, Rejection) else bare_facts(data, form, codec)
                )
                if isinstance(bare_numbers, Rejection):
                    found[place] = bare_numbers
                else:
                    found[place] = {**facts, name: bare_numbers}
        return found


def check_units(candidates: Candidates) -> None:
    """Raise DatasetError if all boxes in tables have another unit than their format. Boxes in files
    are compared when they are read."""
    for name, type in candidates.schema.of_type(Boxes).items():
        if name in candidates.values:
            values = noted_values(candidates, range(len(candidates)))[name]
            boxes = [value for value in values if value is not None]
            if boxes:
                BoxUnits(enough=1).add(name, type, np.concatenate(boxes))


def noted_values(
    candidates: Candidates, positions: Sequence[int]
) -> dict[str, list[NDArray[np.generic] | None]]:
    """Return the values of candidates that must fit their images: boxes, points, and arrays that
    belong to boxes; None for a candidate that lacks the field."""
    return {
        name: [
            column.sample(position) if present is None or present[position] else None
            for position in positions
        ]
        for name, column in candidates.values.items()
        if isinstance(column, DenseColumn | RaggedColumn)
        and (
            isinstance(type := candidates.schema[name], Boxes | Keypoints)
            or (isinstance(type, Array) and type.of is not None)
        )
        for present in (candidates.present.get(name),)
    }


def cut_into_batches(sizes: Ints) -> Iterator[slice]:
    """Cut a list into slices of at most 256 samples and 32 MiB (or one sample). sizes: bytes, shape
    (n,)."""
    start, slice_bytes = 0, 0
    for i, size_bytes in enumerate(sizes.tolist()):
        if i > start and (slice_bytes + size_bytes > _BATCH_BYTES or i - start == _BATCH_SAMPLES):
            yield slice(start, i)
            start, slice_bytes = i, 0
        slice_bytes += size_bytes
    if start < len(sizes):
        yield slice(start, len(sizes))


def read_candidate_batches(
    origin: Origin, candidates: Candidates, shards: Iterator[tuple[int, Ints]], *, workers: int
) -> Iterator[CandidateBatch]:
    """Read the candidates of shards in batches, in order.

    shards: (number, positions). Raises the same errors as `read_candidates`.
    """
    sizes = candidates.sizes

    def pieces() -> Iterator[tuple[int, Ints]]:
        for shard, positions in shards:
            for some in cut_into_batches(sizes[positions]):
                yield shard, positions[some]

    def read(piece: tuple[int, Ints]) -> CandidateBatch:
        shard, positions = piece
        contents = read_candidates(origin, candidates, positions)
        masks = check_masks(contents, candidates.schema, max_pixels=candidates.max_pixels)
        return CandidateBatch(shard=shard, positions=positions, contents=contents, masks=masks)

    yield from ordered(read, pieces(), workers=workers, ahead=_AHEAD + workers, name="intake")
