"""All Maps of a recipe on the batches of a loader: who calls the functions, and what comes back."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.errors import MapError, PenstockError
from penstock.cache.outcomes import STALL_TIMEOUT_S
from penstock.cache.processes import Crew, sendable
from penstock.pipeline.feed.mapping.arguments import plain
from penstock.pipeline.feed.mapping.call import Failure, MapCall, MapResult, MapTask, RemoteCall
from penstock.pipeline.feed.mapping.results import joined, spread
from penstock.pipeline.report.facts import MapFacts
from penstock.readers.fields.columns import DenseColumn, EncodedColumn, ListColumn, SampleBatch
from penstock.readers.fields.field_types import PRESENT, Mask, is_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.augment.map import CheckedMaps, PlacedMap
    from penstock.readers.fields.columns import Column

# Pieces of a batch for each process: samples differ in what they take.
_PIECES = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Station:
    """One Map of the recipe, and who calls its function. crew: None for the reading threads.
    seconds: by the clock, that each reading thread has spent here, by its id."""

    map: PlacedMap
    call: MapCall
    crew: Crew | None
    seconds: dict[int, float]


class Mapper:
    """Calls the functions of a recipe's Maps on batches. Any thread may; close() ends processes.

    What comes out depends on the samples, the seed and the epoch alone, however many threads and
    processes there are.
    """

    def __init__(
        self,
        maps: CheckedMaps,
        *,
        seed: int,
        names: Callable[[list[int]], list[str]],
        timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        """names: of samples, for errors. timeout_s: of a worker process's one task.

        Raises NotPicklableError for a function that can't be sent to its processes."""
        self._names = names
        self.schema = maps.schema
        self._stations = [_station(each, seed=seed, timeout_s=timeout_s) for each in maps.maps]

    @property
    def is_random(self) -> bool:
        """Whether a sample may become another in another epoch."""
        return any(station.call.takes_rng for station in self._stations)

    @property
    def threads(self) -> int:
        """So many reading threads keep all processes busy; 0 where there are none."""
        return max(
            (s.map.op.processes if s.map.op.batched else 1 for s in self._stations if s.crew),
            default=0,
        )

    @property
    def pids(self) -> list[int]:
        """Of its processes."""
        return [pid for station in self._stations if station.crew for pid in station.crew.pids]

    def __call__(self, content: SampleBatch, *, epoch: int, bad: dict[int, str]) -> SampleBatch:
        """The samples with what the functions return.

        bad: rows that no function is shown, and why; those that a function calls bad are added. In
        their place new columns are empty. Raises MapError for what doesn't fit what was declared;
        what a function raises, with the sample named; and as `Crew.run`.
        """
        for station in self._stations:
            began = time.perf_counter()
            content = self._mapped(station, content, epoch, bad)
            thread = threading.get_ident()
            station.seconds[thread] = station.seconds.get(thread, 0.0) + time.perf_counter() - began
        return content

    def _mapped(
        self, station: _Station, batch: SampleBatch, epoch: int, bad: dict[int, str]
    ) -> SampleBatch:
        rows = [row for row in range(len(batch)) if row not in bad]
        taken = batch if len(rows) == len(batch) else batch.take(rows)
        columns = [plain(_column(taken, name), type) for name, type in station.map.takes.items()]
        task = MapTask(epoch=epoch, ids=taken.ids, columns=columns)
        result = self._result(station, task)
        bad.update({rows[place]: why for place, why in result.bad.items()})
        new = dict(result.columns)
        for name, type in station.map.returns.items():
            if isinstance(type, Mask) and type.of in taken.columns:
                self._check_sizes(station, name, new[name], taken, type.of, result.bad)
        if len(rows) < len(batch):
            new = {
                name: spread(column, station.map.returns[name], rows, len(batch))
                for name, column in new.items()
            }
        return replace(batch, columns={**batch.columns, **new})

    def _check_sizes(
        self,
        station: _Station,
        name: str,
        masks: Column,
        taken: SampleBatch,
        image: str,
        bad: Mapping[int, str],
    ) -> None:
        """Raise MapError for a mask of another size than its image. bad: rows that have none."""
        images = taken.columns[image]
        if not isinstance(images, EncodedColumn) or images.dims is None:
            return
        assert isinstance(masks, ListColumn)
        samples: list[Any] = list(masks.samples)
        there = taken.present.get(name)
        for row, mask in enumerate(samples):
            size = tuple(images.dims[row].tolist())
            is_missing = row in bad or (there is not None and not there[row])
            if not is_missing and mask.shape != size:
                misfit = station.call.misfit(
                    name, f"a mask of shape {mask.shape}", f'{size}, as "{image}" is'
                )
                raise self._error(station, Failure(row=row, error=misfit), taken.ids.tolist())

    def _result(self, station: _Station, task: MapTask) -> MapResult:
        pieces = _pieces(len(task.ids), station)
        if station.crew is None or not pieces:
            results = [station.call(task)]
        else:
            tasks = [task.take(range(start, end)) for start, end in pieces]
            results = station.crew.run(
                tasks, words=lambda place: _words(station, tasks[place].ids.tolist())
            )
        bad: dict[int, str] = {}
        for (start, _), result in zip(pieces or [(0, 0)], results, strict=True):
            if result.failure is not None:
                raise self._error(station, result.failure, task.ids[start:].tolist())
            bad |= {start + row: why for row, why in result.bad.items()}
        columns = {
            name: joined([result.columns[name] for result in results])
            for name in station.map.returns
        }
        return MapResult(columns=columns, bad=bad)

    def _error(self, station: _Station, failure: Failure, ids: list[int]) -> Exception:
        """What a function raised, or returned wrongly, with its sample named. ids: of its task."""
        error, row = failure.error, failure.row
        if row is None:
            error.add_note(f"while {_words(station, ids)}")
            return error
        sample_id = ids[row]
        where = f"sample {sample_id}{self._name(sample_id)}"
        if isinstance(error, MapError):
            return MapError(f"At {where}: {error}", sample_id=sample_id)
        error.add_note(f"while {station.map.op.name} was at {where}")
        return error

    def _name(self, sample_id: int) -> str:
        try:
            return f" ({self._names([sample_id])[0]})"
        except PenstockError:  # a shard that can't be opened any more: the id will do
            return ""

    def facts(self) -> MapFacts:
        """What the functions took so far; of the one that took most, who calls it."""
        seconds = [sum(list(station.seconds.values())) for station in self._stations]
        slowest = int(np.argmax(seconds))
        op = self._stations[slowest].map.op
        return MapFacts(
            name=op.name, seconds=sum(seconds), processes=op.processes, batched=op.batched
        )

    def close(self) -> None:
        """End its processes. Safe to call twice."""
        for station in self._stations:
            if station.crew is not None:
                station.crew.close()


def _station(placed: PlacedMap, *, seed: int, timeout_s: float) -> _Station:
    op = placed.op
    call = MapCall(
        fn=op.fn,
        name=op.name,
        returns=placed.returns,
        batched=op.batched,
        takes_rng=op.takes_rng,
        seed=seed,
        index=placed.index,
    )
    crew = None
    if op.processes:
        answer = sendable(RemoteCall(call), what=f"The function of {op.name}")
        crew = Crew(op.processes, answer, name=op.name, timeout_s=timeout_s)
    return _Station(map=placed, call=call, crew=crew, seconds={})


def _column(batch: SampleBatch, name: str) -> Column:
    if name in batch.columns:
        return batch.columns[name]
    if is_number(name, batch.columns):
        return DenseColumn(batch.ids)
    field = name.removesuffix(PRESENT)
    there: Any = batch.present.get(field)
    return DenseColumn(np.ones(len(batch), np.bool_) if there is None else there)


def _pieces(count: int, station: _Station) -> list[tuple[int, int]]:
    """First row and end of each part of a batch that a process does at a time: of a function of
    batches all, as what it gets mustn't depend on the number of processes."""
    if not count:
        return []
    op = station.map.op
    if op.batched:
        return [(0, count)]
    length = -(-count // (_PIECES * max(1, op.processes))) if op.processes else count
    return [(start, min(start + length, count)) for start in range(0, count, length)]


def _words(station: _Station, ids: Sequence[int]) -> str:
    """What a process is at, for errors."""
    shown = ", ".join(map(str, ids[:8])) + (", …" if len(ids) > 8 else "")
    return f"{station.map.op.name} of the samples {shown}"
