"""Call the user's functions of a recipe (`Map`) on the columns of batches, in threads or processes.

A call is the same in a reading thread and in a worker process, which gets a pickled `MapCall`. An
error names its sample.
"""

from __future__ import annotations

import contextlib
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
    Collector,
    MisfitError,
    sample_generators,
    samples_of,
    scattered,
    stacked,
    without_views,
)
from penstock.pipeline.report import MapFacts
from penstock.readers.fieldtypes import (
    PRESENT,
    DenseColumn,
    EncodedColumn,
    ListColumn,
    SampleBatch,
    is_number,
    joined_columns,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.augment import PlacedMap
    from penstock.readers.fieldtypes import Column, FieldType, Schema

    Collectors = Mapping[str, Collector]

_SALT = 0x3A95F17C  # separates these hashes from those of order, draws and substitutes
_REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class MapTask:
    """Samples for a function. ids: shape (n,). columns: one per field, without views on files."""

    epoch: int
    ids: NDArray[np.int64]
    columns: Sequence[Column]

    def take(self, rows: Sequence[int]) -> MapTask:
        """Return some of the samples."""
        columns = [column.take(rows) for column in self.columns]
        return MapTask(epoch=self.epoch, ids=self.ids[rows], columns=columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class MapFailure:
    """The error that ended a call. row: of its sample; None if it concerns no single sample."""

    row: int | None
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class MapResult:
    """The result of a task: columns by field, and bad rows with reasons; or a failure."""

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
    """A user's function and its declared results. Worker processes get it pickled.

    name: of the operation, for messages. returns: types by field. index: its number among the
    recipe's Maps, which keys its random numbers together with the seed.
    """

    fn: Callable[..., Any]
    name: str
    returns: Mapping[str, FieldType]
    batched: bool
    takes_rng: bool
    seed: int
    index: int

    def __call__(self, task: MapTask) -> MapResult:
        """Call the function on all samples of a task. Errors are returned, not raised."""
        count = len(task.ids)
        collectors = {name: Collector(type, count) for name, type in self.returns.items()}
        bad: dict[int, str] = {}
        try:
            if not self.batched:
                self._each(task, collectors, bad)
            elif count:
                self._all(task, collectors, bad)
        except _CallFailed as stop:
            return MapResult(failure=stop.failure)
        columns = {name: each.column() for name, each in collectors.items()}
        return MapResult(columns=columns, bad=bad)

    def _each(self, task: MapTask, collectors: Collectors, bad: dict[int, str]) -> None:
        """Call the function once per sample."""
        arguments = [samples_of(column) for column in task.columns]
        rngs = self._generators(task)
        for row in range(len(task.ids)):
            more = {"rng": rngs[row]} if rngs else {}
            try:
                value = self._call([argument[row] for argument in arguments], more, row)
            except BadSampleError as error:
                bad[row] = _reason(error)
                continue
            for name, part in self._parts(value, row).items():
                try:
                    collectors[name].put(row, part)
                except MisfitError as error:
                    raise self._unfit(name, row, error) from None

    def _all(self, task: MapTask, collectors: Collectors, bad: dict[int, str]) -> None:
        """Call the function once for all samples; if it raises BadSampleError, once for each."""
        try:
            parts = self._batch(task)
        except BadSampleError as error:
            if len(task.ids) == 1:
                bad[0] = _reason(error)
                return
            for row in range(len(task.ids)):
                self._alone(task, row, collectors, bad)
            return
        for name, part in parts.items():
            try:
                collectors[name].put_all(part)
            except MisfitError as error:
                raise self._unfit(name, None, error) from None

    def _alone(self, task: MapTask, row: int, collectors: Collectors, bad: dict[int, str]) -> None:
        try:
            parts = self._batch(task.take([row]))
        except BadSampleError as error:
            bad[row] = _reason(error)
            return
        for name, part in parts.items():
            try:
                collectors[name].put(row, part[0])
            except MisfitError as error:
                raise self._unfit(name, row, error) from None

    def _batch(self, task: MapTask) -> Mapping[str, Any]:
        """Call the function on all samples at once, and return its values by field.

        Each field has as many values as there are samples; otherwise the call fails.
        """
        rngs, count = self._generators(task), len(task.ids)
        row = 0 if count == 1 else None
        value = self._call(list(map(stacked, task.columns)), {"rngs": rngs} if rngs else {}, row)
        parts = self._parts(value, row)
        for name, part in parts.items():
            is_many = hasattr(part, "__len__") and hasattr(part, "__getitem__")
            is_scalar = getattr(part, "ndim", 1) == 0
            if not is_many or is_scalar or isinstance(part, str | bytes | Mapping):
                raise _CallFailed(
                    row, self.misfit(name, type(part).__name__, f"a list or array of {count}")
                )
            if len(part) != count:
                raise _CallFailed(
                    row, self.misfit(name, f"{len(part)} values", f"one a sample: {count}")
                )
        return parts

    def _generators(self, task: MapTask) -> list[np.random.Generator]:
        """Return a random generator per sample; none if the function takes none."""
        if not self.takes_rng:
            return []
        return sample_generators(keyed_hash(self.seed, task.epoch, task.ids, _SALT, self.index))

    def _call(self, arguments: list[Any], more: dict[str, Any], row: int | None) -> Any:
        try:
            return self.fn(*arguments, **more)
        except BadSampleError:
            raise
        except StopIteration as error:  # it would silently end the loader's own loop
            raised = RuntimeError(
                f"{self.name} raised StopIteration: does it call next() on an exhausted iterator?"
            )
            raise _CallFailed(row, raised) from error
        except ValueError as error:
            if "read-only" in str(error) or "not writeable" in str(error):
                raise _CallFailed(
                    row,
                    MapError(
                        f"{self.name} changes its argument in place, but the array belongs to the "
                        "dataset. Copy it first, as in x = x.copy()."
                    ),
                ) from error
            raise _CallFailed(row, error) from error
        except Exception as error:  # raised again later, with the sample's name
            raise _CallFailed(row, error) from error

    def _parts(self, value: Any, row: int | None) -> Mapping[str, Any]:
        """Return the function's values by field."""
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
        """Return the error for a value that doesn't fit its field."""
        return MapError(
            f'{self.name} returned {got} for "{field}", wanted {wanted}. Convert it in the '
            "function, or declare its type by returns={...} of Map."
        )

    def _unfit(self, field: str, row: int | None, error: MisfitError) -> _CallFailed:
        at = error.row if row is None else row
        return _CallFailed(at, self.misfit(field, error.got, error.wanted))


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """A call for worker processes, whose errors can be sent back."""

    call: MapCall

    def __call__(self, task: MapTask) -> MapResult:
        result = self.call(task)
        failure = result.failure
        if failure is None:
            return result
        return MapResult(failure=MapFailure(row=failure.row, error=_sendable(failure.error)))


def _sendable(error: Exception) -> Exception:
    """Return an error that can be pickled: the error itself if possible, or a WorkerError.

    Either contains the traceback.
    """
    trace = "".join(traceback.format_exception(error)).rstrip()
    error.add_note(f"In the worker process:\n{trace}")
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:  # the class is foreign, and unpickling it may fail in any way
        again = None
    if type(again) is type(error):
        return error
    return WorkerError(f"{type(error).__name__} in a worker process: {error}\n{trace}")


def _reason(error: BadSampleError) -> str:
    return " ".join(str(error).split())[:_REASON_CHARACTERS] or "its Map raised BadSampleError"


# Pieces of a batch per process, because samples take different times.
_PIECES = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _MapStage:
    """One Map of the recipe.

    workers: the processes that call its function; None if reading threads do. seconds: wall-clock
    time that each reading thread has spent on it, by the thread's id.
    """

    map: PlacedMap
    call: MapCall
    workers: WorkerProcesses | None
    seconds: dict[int, float]


class Mapper:
    """Calls the functions of a recipe's Maps on batches. Any thread may call it.

    The results depend only on the samples, the seed and the epoch, not on the number of threads or
    processes.
    """

    def __init__(
        self,
        maps: Sequence[PlacedMap],
        schema: Schema,
        *,
        seed: int,
        names: Callable[[list[int]], list[str]],
        timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        """names: returns the names of samples, for errors. timeout_s: for one task of a process.

        Raises NotPicklableError for a function that can't be sent to processes.
        """
        self._names = names
        self.schema = schema
        self._stages = [_map_stage(each, seed=seed, timeout_s=timeout_s) for each in maps]

    @property
    def is_random(self) -> bool:
        """True if a sample's result may differ between epochs."""
        return any(stage.call.takes_rng for stage in self._stages)

    @property
    def threads(self) -> int:
        """The number of reading threads that keep all processes busy; 0 without processes."""
        return max(
            (s.map.op.processes if s.map.op.batched else 1 for s in self._stages if s.workers),
            default=0,
        )

    @property
    def pids(self) -> list[int]:
        """The ids of its processes."""
        return [pid for stage in self._stages if stage.workers for pid in stage.workers.pids]

    def __call__(self, content: SampleBatch, *, epoch: int, bad: dict[int, str]) -> SampleBatch:
        """Return the samples with the results of the functions.

        bad: rows that the functions don't get, with reasons. Rows for which a function raises
        BadSampleError are added; their new values are empty. Raises MapError for a result that
        doesn't fit its declared type; the errors of the functions, with the sample's name; and the
        errors of `WorkerProcesses.run`.
        """
        for stage in self._stages:
            began = time.perf_counter()
            content = self._mapped(stage, content, epoch, bad)
            thread = threading.get_ident()
            stage.seconds[thread] = stage.seconds.get(thread, 0.0) + time.perf_counter() - began
        return content

    def _mapped(
        self, stage: _MapStage, batch: SampleBatch, epoch: int, bad: dict[int, str]
    ) -> SampleBatch:
        rows = [row for row in range(len(batch)) if row not in bad]
        taken = batch if len(rows) == len(batch) else batch.take(rows)
        columns = [
            without_views(_column(taken, name), type) for name, type in stage.map.takes.items()
        ]
        task = MapTask(epoch=epoch, ids=taken.ids, columns=columns)
        result = self._result(stage, task)
        bad.update({rows[place]: why for place, why in result.bad.items()})
        new = dict(result.columns)
        for name, type in stage.map.returns.items():
            image = type.reference
            if type.has_sides and image is not None and image in taken.columns:
                self._check_sizes(stage, name, new[name], taken, image, result.bad)
        if len(rows) < len(batch):
            new = {
                name: scattered(column, stage.map.returns[name], rows, len(batch))
                for name, column in new.items()
            }
        return replace(batch, columns={**batch.columns, **new})

    def _check_sizes(
        self,
        stage: _MapStage,
        name: str,
        masks: Column,
        taken: SampleBatch,
        image: str,
        bad: Mapping[int, str],
    ) -> None:
        """Raise MapError for a mask of another size than its image. bad: rows without a mask."""
        images = taken.columns[image]
        if not isinstance(images, EncodedColumn) or images.dims is None:
            return
        assert isinstance(masks, ListColumn)
        samples: list[Any] = list(masks.samples)
        present = taken.present.get(name)
        for row, mask in enumerate(samples):
            size = tuple(images.dims[row].tolist())
            is_missing = row in bad or (present is not None and not present[row])
            if not is_missing and mask.shape != size:
                misfit = stage.call.misfit(
                    name, f"a mask of shape {mask.shape}", f'{size}, as "{image}" is'
                )
                raise self._error(stage, MapFailure(row=row, error=misfit), taken.ids.tolist())

    def _result(self, stage: _MapStage, task: MapTask) -> MapResult:
        pieces = _pieces(len(task.ids), stage)
        if stage.workers is None or not pieces:
            results = [stage.call(task)]
        else:
            tasks = [task.take(range(start, end)) for start, end in pieces]
            results = stage.workers.run(
                tasks, describe=lambda place: _describe(stage, tasks[place].ids.tolist())
            )
        bad: dict[int, str] = {}
        for (start, _), result in zip(pieces or [(0, 0)], results, strict=True):
            if result.failure is not None:
                raise self._error(stage, result.failure, task.ids[start:].tolist())
            bad |= {start + row: why for row, why in result.bad.items()}
        columns = {
            name: joined_columns([result.columns[name] for result in results])
            for name in stage.map.returns
        }
        return MapResult(columns=columns, bad=bad)

    def _error(self, stage: _MapStage, failure: MapFailure, ids: list[int]) -> Exception:
        """Return the error of a failed call, with the sample's name. ids: of the task's samples."""
        error, row = failure.error, failure.row
        if row is None:
            error.add_note(f"while {_describe(stage, ids)}")
            return error
        sample_id = ids[row]
        sample = f"sample {sample_id}"
        with contextlib.suppress(PenstockError):  # a shard can't be opened: the id has to suffice
            sample += f" ({self._names([sample_id])[0]})"
        if isinstance(error, MapError):
            return MapError(f"At {sample}: {error}", sample_id=sample_id)
        error.add_note(f"while {stage.map.op.name} was processing {sample}")
        return error

    def facts(self) -> MapFacts:
        """Return the time of all functions so far, and the settings of the slowest."""
        seconds = [sum(list(stage.seconds.values())) for stage in self._stages]
        slowest = int(np.argmax(seconds))
        op = self._stages[slowest].map.op
        return MapFacts(
            name=op.name, seconds=sum(seconds), processes=op.processes, batched=op.batched
        )

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        for stage in self._stages:
            if stage.workers is not None:
                stage.workers.close()


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
    workers = None
    if op.processes:
        answer = pickle_for_worker(RemoteCall(call), what=f"The function of {op.name}")
        workers = WorkerProcesses(op.processes, answer, name=op.name, timeout_s=timeout_s)
    return _MapStage(map=placed, call=call, workers=workers, seconds={})


def _column(batch: SampleBatch, name: str) -> Column:
    if name in batch.columns:
        return batch.columns[name]
    if is_number(name, batch.columns):
        return DenseColumn(batch.ids)
    field = name.removesuffix(PRESENT)
    present: Any = batch.present.get(field)
    return DenseColumn(np.ones(len(batch), np.bool_) if present is None else present)


def _pieces(count: int, stage: _MapStage) -> list[tuple[int, int]]:
    """Return the first row and the end of each part of a batch that is one task.

    A function of batches gets the whole batch, so that its arguments don't depend on the number of
    processes.
    """
    if not count:
        return []
    op = stage.map.op
    if op.batched:
        return [(0, count)]
    length = -(-count // (_PIECES * max(1, op.processes))) if op.processes else count
    return [(start, min(start + length, count)) for start in range(0, count, length)]


def _describe(stage: _MapStage, ids: Sequence[int]) -> str:
    """Describe the task of a process, for errors."""
    shown = ", ".join(map(str, ids[:8])) + (", …" if len(ids) > 8 else "")
    return f"{stage.map.op.name} of the samples {shown}"
