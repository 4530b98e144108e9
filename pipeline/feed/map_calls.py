"""Call the user's functions of a recipe (`Map`) on the columns of batches, in threads or processes.

A call is the same in a reading thread and in a worker process: `MapCall` is pickled as it is. An
error names the sample that it is about.
"""

from __future__ import annotations

import pickle
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import (
    STALL_TIMEOUT_S,
    BadSampleError,
    MapError,
    PenstockError,
    WorkerError,
    WorkerProcesses,
    pickle_for_worker,
)
from penstock.cache.base import keyed_hash
from penstock.pipeline.feed.map_values import (
    MisfitError,
    collector,
    concatenated,
    sample_generators,
    samples_of,
    scattered,
    stacked,
    without_views,
)
from penstock.pipeline.report import MapFacts
from penstock.readers.fields import (
    PRESENT,
    DenseColumn,
    EncodedColumn,
    ListColumn,
    Mask,
    SampleBatch,
    is_number,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.augment import CheckedMaps, PlacedMap
    from penstock.pipeline.feed.map_values import Collector
    from penstock.readers.fields import Column, FieldType

    Takers = Mapping[str, Collector]

_SALT = 0x3A95F17C  # keeps these hashes apart from those of order, draws and substitutes
_REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class MapTask:
    """Samples for a function: ids, shape (n,); columns: without views on files, one a field."""

    epoch: int
    ids: NDArray[np.int64]
    columns: Sequence[Column]

    def take(self, rows: Sequence[int]) -> MapTask:
        """Some of the samples."""
        columns = [column.take(rows) for column in self.columns]
        return MapTask(epoch=self.epoch, ids=self.ids[rows], columns=columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class MapFailure:
    """What stopped a function. row: at which sample; None: at none of them alone."""

    row: int | None
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class MapResult:
    """What became of a task: columns by field; bad: rows that the function called bad, and why;
    or a failure."""

    columns: Mapping[str, Column] = field(default_factory=dict)
    bad: Mapping[int, str] = field(default_factory=dict)
    failure: MapFailure | None = None


class _CallFailed(Exception):
    """Carries a failure out of a loop over samples."""

    def __init__(self, row: int | None, error: Exception) -> None:
        super().__init__(row)
        self.failure = MapFailure(row=row, error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class MapCall:
    """A user's function, and what it was declared to give. Sent to worker processes as it is.

    name: of the operation, for people. returns: types by field. index: its place among the
    recipe's Maps, which keys its random numbers with the seed.
    """

    fn: Callable[..., Any]
    name: str
    returns: Mapping[str, FieldType]
    batched: bool
    takes_rng: bool
    seed: int
    index: int

    def __call__(self, task: MapTask) -> MapResult:
        """Call the function on all samples of a task; it raises nothing of what that raises."""
        count = len(task.ids)
        takers = {name: collector(type, count) for name, type in self.returns.items()}
        bad: dict[int, str] = {}
        try:
            if not self.batched:
                self._each(task, takers, bad)
            elif count:
                self._all(task, takers, bad)
        except _CallFailed as stop:
            return MapResult(failure=stop.failure)
        return MapResult(columns={name: one.column() for name, one in takers.items()}, bad=bad)

    def _each(self, task: MapTask, takers: Takers, bad: dict[int, str]) -> None:
        """A call a sample."""
        arguments = [samples_of(column) for column in task.columns]
        rngs = self._generators(task)
        for row in range(len(task.ids)):
            more = {"rng": rngs[row]} if rngs else {}
            try:
                value = self._called([argument[row] for argument in arguments], more, row)
            except BadSampleError as error:
                bad[row] = _reason(error)
                continue
            for name, part in self._parts(value, row).items():
                try:
                    takers[name].put(row, part)
                except MisfitError as error:
                    raise self._unfit(name, row, error) from None

    def _all(self, task: MapTask, takers: Takers, bad: dict[int, str]) -> None:
        """One call for all samples; where it calls one of them bad, a call for each alone."""
        try:
            parts = self._batch(task)
        except BadSampleError as error:
            if len(task.ids) == 1:
                bad[0] = _reason(error)
                return
            for row in range(len(task.ids)):
                self._alone(task, row, takers, bad)
            return
        for name, part in parts.items():
            try:
                takers[name].put_all(part)
            except MisfitError as error:
                raise self._unfit(name, None, error) from None

    def _alone(self, task: MapTask, row: int, takers: Takers, bad: dict[int, str]) -> None:
        try:
            parts = self._batch(task.take([row]))
        except BadSampleError as error:
            bad[row] = _reason(error)
            return
        for name, part in parts.items():
            try:
                takers[name].put(row, part[0])
            except MisfitError as error:
                raise self._unfit(name, row, error) from None

    def _batch(self, task: MapTask) -> Mapping[str, Any]:
        """What a function of batches gives, by field: as many values each as there are samples."""
        rngs, count = self._generators(task), len(task.ids)
        row = 0 if count == 1 else None
        value = self._called(list(map(stacked, task.columns)), {"rngs": rngs} if rngs else {}, row)
        parts = self._parts(value, row)
        for name, part in parts.items():
            is_many = hasattr(part, "__len__") and hasattr(part, "__getitem__")
            if not is_many or isinstance(part, str | bytes | Mapping) or not _ndim(part):
                raise _CallFailed(
                    row, self.misfit(name, type(part).__name__, f"a list or array of {count}")
                )
            if len(part) != count:
                raise _CallFailed(
                    row, self.misfit(name, f"{len(part)} values", f"one a sample: {count}")
                )
        return parts

    def _generators(self, task: MapTask) -> list[np.random.Generator]:
        """The samples' own random numbers; none where the function doesn't take them."""
        if not self.takes_rng:
            return []
        return sample_generators(keyed_hash(self.seed, task.epoch, task.ids, _SALT, self.index))

    def _called(self, arguments: list[Any], more: dict[str, Any], row: int | None) -> Any:
        try:
            return self.fn(*arguments, **more)
        except BadSampleError:
            raise
        except StopIteration as error:  # it would end the loader's own loop, and nobody would know
            told = RuntimeError(f"{self.name} raised StopIteration: a next() of an iterator's end?")
            raise _CallFailed(row, told) from error
        except ValueError as error:
            if "read-only" in str(error) or "not writeable" in str(error):
                raise _CallFailed(
                    row,
                    MapError(
                        f"{self.name} changes what it was given in place, and that is the "
                        "dataset's: copy it first, as in x = x.copy()."
                    ),
                ) from error
            raise _CallFailed(row, error) from error
        except Exception as error:  # the user's: raised again, with the sample named
            raise _CallFailed(row, error) from error

    def _parts(self, value: Any, row: int | None) -> Mapping[str, Any]:
        """What was returned, by field."""
        names = list(self.returns)
        if isinstance(value, Mapping) and set(value) == set(names):
            return value
        if len(names) == 1:
            return {names[0]: value}
        if isinstance(value, tuple | list) and len(value) == len(names):
            return dict(zip(names, value, strict=True))
        got = f"{len(value)} values" if isinstance(value, tuple | list) else type(value).__name__
        wanted = f"a tuple of {len(names)}, or a dict, for {', '.join(names)}"
        raise _CallFailed(row, MapError(f"{self.name} returned {got}, wanted {wanted}."))

    def misfit(self, field: str, got: str, wanted: str) -> MapError:
        """The error for what was returned for a field."""
        return MapError(
            f'{self.name} returned {got} for "{field}", wanted {wanted}. Convert it there, or say '
            "what it is: returns={...} of Map."
        )

    def _unfit(self, field: str, row: int | None, error: MisfitError) -> _CallFailed:
        """What to raise where a value doesn't fit a field."""
        at = error.row if row is None else row
        return _CallFailed(at, self.misfit(field, error.got, error.wanted))


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """A call for worker processes: what it raises can be sent back."""

    call: MapCall

    def __call__(self, task: MapTask) -> MapResult:
        result = self.call(task)
        failure = result.failure
        if failure is None:
            return result
        return MapResult(failure=MapFailure(row=failure.row, error=_sendable(failure.error)))


def _sendable(error: Exception) -> Exception:
    """The error if it survives pickling, with its traceback as a note; else one that tells it."""
    told = "".join(traceback.format_exception(error)).rstrip()
    error.add_note(f"In the worker process:\n{told}")
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:  # classes of anybody's
        again = None
    if type(again) is type(error):
        return error
    return WorkerError(f"{type(error).__name__} in a worker process: {error}\n{told}")


def _reason(error: BadSampleError) -> str:
    return " ".join(str(error).split())[:_REASON_CHARACTERS] or "its Map says so"


def _ndim(part: Any) -> int:
    """Dimensions of an array; 1 of a list."""
    return int(getattr(part, "ndim", 1))


# Pieces of a batch for each process: samples differ in what they take.
_PIECES = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _MapStage:
    """One Map of the recipe, and who calls its function. crew: None for the reading threads.
    seconds: by the clock, that each reading thread has spent here, by its id."""

    map: PlacedMap
    call: MapCall
    crew: WorkerProcesses | None
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
        self._stations = [_map_stage(each, seed=seed, timeout_s=timeout_s) for each in maps.maps]

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
        self, station: _MapStage, batch: SampleBatch, epoch: int, bad: dict[int, str]
    ) -> SampleBatch:
        rows = [row for row in range(len(batch)) if row not in bad]
        taken = batch if len(rows) == len(batch) else batch.take(rows)
        columns = [
            without_views(_column(taken, name), type) for name, type in station.map.takes.items()
        ]
        task = MapTask(epoch=epoch, ids=taken.ids, columns=columns)
        result = self._result(station, task)
        bad.update({rows[place]: why for place, why in result.bad.items()})
        new = dict(result.columns)
        for name, type in station.map.returns.items():
            if isinstance(type, Mask) and type.of in taken.columns:
                self._check_sizes(station, name, new[name], taken, type.of, result.bad)
        if len(rows) < len(batch):
            new = {
                name: scattered(column, station.map.returns[name], rows, len(batch))
                for name, column in new.items()
            }
        return replace(batch, columns={**batch.columns, **new})

    def _check_sizes(
        self,
        station: _MapStage,
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
                raise self._error(station, MapFailure(row=row, error=misfit), taken.ids.tolist())

    def _result(self, station: _MapStage, task: MapTask) -> MapResult:
        pieces = _pieces(len(task.ids), station)
        if station.crew is None or not pieces:
            results = [station.call(task)]
        else:
            tasks = [task.take(range(start, end)) for start, end in pieces]
            results = station.crew.run(
                tasks, describe=lambda place: _words(station, tasks[place].ids.tolist())
            )
        bad: dict[int, str] = {}
        for (start, _), result in zip(pieces or [(0, 0)], results, strict=True):
            if result.failure is not None:
                raise self._error(station, result.failure, task.ids[start:].tolist())
            bad |= {start + row: why for row, why in result.bad.items()}
        columns = {
            name: concatenated([result.columns[name] for result in results])
            for name in station.map.returns
        }
        return MapResult(columns=columns, bad=bad)

    def _error(self, station: _MapStage, failure: MapFailure, ids: list[int]) -> Exception:
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


def _map_stage(placed: PlacedMap, *, seed: int, timeout_s: float) -> _MapStage:
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
        answer = pickle_for_worker(RemoteCall(call), what=f"The function of {op.name}")
        crew = WorkerProcesses(op.processes, answer, name=op.name, timeout_s=timeout_s)
    return _MapStage(map=placed, call=call, crew=crew, seconds={})


def _column(batch: SampleBatch, name: str) -> Column:
    if name in batch.columns:
        return batch.columns[name]
    if is_number(name, batch.columns):
        return DenseColumn(batch.ids)
    field = name.removesuffix(PRESENT)
    there: Any = batch.present.get(field)
    return DenseColumn(np.ones(len(batch), np.bool_) if there is None else there)


def _pieces(count: int, station: _MapStage) -> list[tuple[int, int]]:
    """First row and end of each part of a batch that a process does at a time: of a function of
    batches all, as what it gets mustn't depend on the number of processes."""
    if not count:
        return []
    op = station.map.op
    if op.batched:
        return [(0, count)]
    length = -(-count // (_PIECES * max(1, op.processes))) if op.processes else count
    return [(start, min(start + length, count)) for start in range(0, count, length)]


def _words(station: _MapStage, ids: Sequence[int]) -> str:
    """What a process is at, for errors."""
    shown = ", ".join(map(str, ids[:8])) + (", …" if len(ids) > 8 else "")
    return f"{station.map.op.name} of the samples {shown}"
