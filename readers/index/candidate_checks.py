"""Check candidates: read each sample once, decode it, and record facts about it, or a rejection.

Candidates are read ahead on threads, in bounded batches. They are checked shard by shard, by this
process (`check_here`) or by the workers of an executor (`check_by_executor`), which return a few
dozen bytes per sample. Their results are kept in the index's folder, `parts/`, until the index is
complete: if the driver is killed, the same call resumes from them. An updated index reuses the
facts about unchanged files (`earlier_facts`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import ordered, run_tasks
from penstock.readers.fieldtypes import (
    BoxUnits,
    ListColumn,
    check_files,
    check_related,
    examine,
    verify_for,
)
from penstock.readers.files import make_folder, write_bytes
from penstock.readers.formats import MISSING, read_candidates
from penstock.readers.types import Facts, Ints, Rejection, Verify
from penstock.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from penstock.readers.files import ProgressReporter
    from penstock.readers.formats import Candidates, Contents, Sidecar
    from penstock.readers.index.dataset_description import DatasetDescription
    from penstock.readers.origin import Entry, Origin


Results = list["Mapping[str, Facts] | Rejection"]
"""The facts about each field of a sample, or its rejection, for several samples."""

# Enough images for every core of a large machine, and small enough that a few batches in flight
# take tens of megabytes.
_BATCH_BYTES = 32 * 2**20
_BATCH_SAMPLES = 256
_AHEAD = 3
_NO_FACTS = Facts(0, 0, 0, (), "")
PARTS = b"parts"
"""The folder in the index's folder that keeps the results of an executor's workers until the index
is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateBatch:
    """Some candidates of one shard. positions: int64, shape (n,). contents: by span field, the
    bytes or a rejection for each candidate, None if it lacks the field. checked: the facts of
    fields that need no decoder of images, such as masks."""

    positions: Ints
    contents: Contents
    checked: Mapping[str, Sequence[Facts | Rejection | None]]

    def examine(self, candidates: Candidates, verify: Verify | None) -> Results:
        """Check the samples completely. verify: decodes images; None if there are none."""
        if not self.contents:
            return [{} for _ in self.positions]
        return examine(
            self.contents,
            candidates.schema,
            verify,
            noted=noted_values(candidates, self.positions.tolist()),
            checked=self.checked,
            max_pixels=candidates.max_pixels,
        )


def check_units(candidates: Candidates) -> None:
    """Raise DatasetError if all boxes in tables have another unit than their format. Boxes in files
    are compared when they are read."""
    units = BoxUnits(enough=1)
    for name, values in noted_values(candidates, range(len(candidates))).items():
        found = [value for value in values if value is not None]
        if found and candidates.schema[name].is_boxes:
            units.add(name, candidates.schema[name], np.concatenate(found))


def noted_values(
    candidates: Candidates, positions: Sequence[int]
) -> dict[str, list[NDArray[np.generic] | None]]:
    """Return the values of candidates that their type checks, such as boxes, and of arrays that
    belong to boxes; encoded ones as bytes; None for a candidate that lacks the field."""
    return {
        name: [
            column.sample(position) if present is None or present[position] else None
            for position in positions
        ]
        for name, column in candidates.values.items()
        if not isinstance(column, ListColumn)
        and ((type := candidates.schema[name]).checks_values or type.reference is not None)
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
    origin: Origin, candidates: Candidates, shards: Iterable[Ints], *, workers: int
) -> Iterator[CandidateBatch]:
    """Read the candidates of shards in batches, in order. A batch is of one shard.

    shards: positions. Raises the same errors as `read_candidates`.
    """
    sizes = candidates.sizes
    pieces = (each[part] for each in shards for part in cut_into_batches(sizes[each]))

    def read(positions: Ints) -> CandidateBatch:
        contents, schema = read_candidates(origin, candidates, positions), candidates.schema
        codecs = {name: spans.codec for name, spans in candidates.spans.items() if spans.codec}
        checked = check_files(contents, schema, codecs=codecs, max_pixels=candidates.max_pixels)
        return CandidateBatch(positions=positions, contents=contents, checked=checked)

    yield from ordered(read, pieces, workers=workers, ahead=_AHEAD + workers, name="intake")


def earlier_facts(
    candidates: Candidates, sidecars: Iterable[Sidecar]
) -> tuple[dict[int, Mapping[str, Facts]], int]:
    """Match the facts in all sidecars of an earlier index with the current candidates.

    Return, by position, the facts about candidates whose files have the same listing, which needn't
    be read; and the number of samples of that index whose names still exist. Raises the errors of
    reading the sidecars.
    """
    names: set[bytes] = set()
    known: dict[tuple[bytes, str], tuple[Entry, Facts]] = {}
    for sidecar in sidecars:
        names.update(sidecar.names)
        files = list(sidecar.files.entries())
        for name in sidecar.layout.stored("span"):
            notes, was = sidecar.fields[name], sidecar.layout.schema[name]
            now = candidates.schema.get(name)
            # An image isn't decoded like a mask, so a field of another type has no facts.
            if now is None or type(was) is not type(now) or was.reference != now.reference:
                continue
            assert notes.files is not None
            assert notes.crcs is not None
            arrays = (notes.files, notes.crcs, notes.starts, notes.sizes)
            columns = [each.tolist() for each in arrays]
            shapes = [()] * sidecar.samples if notes.shapes is None else notes.shapes.tolist()
            rows = zip(sidecar.names, *columns, shapes, notes.codecs, strict=True)
            for sample, file, crc, start, size, shape, codec in rows:
                if file != MISSING:
                    facts = Facts(crc, start, size, tuple(shape), codec)
                    known[sample, name] = files[file], facts
    same: dict[int, Mapping[str, Facts]] = {}
    for position, sample in enumerate(candidates.names):
        found: dict[str, Facts] = {}
        for name, spans in candidates.spans.items():
            number = int(spans.files[position])
            if number == MISSING:
                continue
            entry, facts = known.get((sample, name), (None, _NO_FACTS))
            skipped = facts.start - int(spans.starts[position])
            is_alike = skipped >= 0 and skipped + facts.size == spans.sizes[position]
            if entry != candidates.files[number] or not is_alike:
                break
            found[name] = replace(facts, start=skipped)
        else:
            if sample in names:
                same[position] = found
    return same, len(names.intersection(candidates.names))


def reusable_facts(
    candidates: Candidates, position: int, facts: Mapping[str, Facts]
) -> Mapping[str, Facts] | Rejection:
    """Return the facts of a sample whose files are unchanged, checked against the current values of
    tables."""
    noted = {name: value for name, (value,) in noted_values(candidates, [position]).items()}
    return (check_related(noted, facts, candidates.schema) or facts) if noted else facts


def results_to_json(results: Results) -> bytes:
    """Encode the results of a shard for a file; `results_of_json` decodes them."""
    found = [
        each.reason if isinstance(each, Rejection) else {n: astuple(f) for n, f in each.items()}
        for each in results
    ]
    return json.dumps(found).encode("ascii")


def results_of_json(data: bytes, count: int) -> Results:
    """Decode the results of so many samples. Raises ValueError for anything else."""
    try:
        found: Results = [
            Rejection(each)
            if isinstance(each, str)
            else {n: Facts(a, b, c, tuple(d), *rest) for n, (a, b, c, d, *rest) in each.items()}
            for each in json.loads(data)
        ]
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not the results of a shard: {error}") from error
    if len(found) != count:
        raise ValueError(f"got {len(found)} samples, wanted {count}")
    return found


def check_here(
    origin: Origin,
    candidates: Candidates,
    shards: Sequence[Ints],
    *,
    verify: Verify | str | None,
    workers: int,
    reporter: ProgressReporter | None = None,
) -> Iterator[Results]:
    """Check candidates on threads of this process. Yield the results of each shard, in order.
    shards: positions. verify: decodes images; None means the installed decoder. Raises errors of
    reading."""
    sizes, schema, decoder = candidates.sizes, candidates.schema, None
    if not candidates.chunked:  # samples in chunks aren't decoded
        decoder = verify_for(schema, verify, workers=workers, max_pixels=candidates.max_pixels)
    batches = read_candidate_batches(origin, candidates, shards, workers=workers)
    for positions in shards:
        found: Results = []
        while len(found) < len(positions):
            batch = next(batches)
            found += batch.examine(candidates, decoder)
            if reporter is not None:
                reporter.done(len(batch.positions), int(sizes[batch.positions].sum()))
        yield found


def check_task(data: DatasetDescription, candidates: Candidates, verify: str | None) -> Results:
    """Check the samples of one shard, on one thread of a worker. data: the candidates' dataset.
    verify: the name of a decoder; None means the installed one. Raises errors of reading."""
    origin, _ = data.open_files()
    (checked,) = check_here(origin, candidates, candidates.shards, verify=verify, workers=1)
    return checked


def check_by_executor(
    executor: Executor,
    data: DatasetDescription,
    candidates: Candidates,
    shards: Sequence[Ints],
    *,
    verify: str | None,
    key: str,
    folder: bytes,
    reporter: ProgressReporter,
) -> Iterator[Results]:
    """Check candidates by the workers of an executor, then yield the results of each shard, in
    order. data: of the candidates, for the workers. shards: positions. verify: the name of a
    decoder. key: identifies the listing. folder: of the index, which keeps the results in
    `PARTS`."""
    inputs = json.dumps([key, __version__, verify]).encode()
    own = hashlib.sha256(inputs).hexdigest()[:32].encode()
    parts, sizes = os.path.join(folder, PARTS), candidates.sizes
    for name in os.listdir(parts) if os.path.isdir(parts) else ():
        if name != own:
            shutil.rmtree(os.path.join(parts, name), ignore_errors=True)
    make_folder(os.path.join(parts, own))
    paths = [os.path.join(parts, own, b"%06d.json" % shard) for shard in range(len(shards))]

    def known(shard: int) -> Results | None:
        """Read the results of a shard; None if there are none that can be used."""
        if not len(shards[shard]):
            return []
        with suppress(FileNotFoundError, ValueError), open(paths[shard], "rb") as file:
            return results_of_json(file.read(), len(shards[shard]))
        return None

    def report(shard: int) -> None:
        reporter.done(len(shards[shard]), int(sizes[shards[shard]].sum()))

    left = [shard for shard in range(len(shards)) if known(shard) is None]
    for shard in {*range(len(shards))}.difference(left):
        report(shard)
    taken = ((shard, candidates.take(shards[shard])) for shard in left)
    tasks = ((shard, partial(check_task, data, some, verify)) for shard, some in taken)
    for shard, results in run_tasks(executor, tasks, what="shards", total=len(left)):
        write_bytes(paths[shard], results_to_json(results))
        report(shard)
    for shard in range(len(shards)):
        found = known(shard)
        assert found is not None, shard
        yield found
