"""Call the user's functions of a recipe (`Map`) on the columns of batches, in threads or processes.

A call is the same in a reading thread and in a worker process, which gets a pickled `MapCall`. An
error names its sample.

Arguments are Python and numpy values. Each result is checked against the type that the `Map`
declares, and copied at once, because the function may change it later. Python numbers are converted
to the declared dtype if that loses nothing; arrays must have it.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from penstock.pipeline.plan import Delivery
from penstock.pipeline.report import MapFacts
from penstock.readers.fieldtypes import (
    PRESENT,
    ArrayForm,
    DenseColumn,
    EncodedColumn,
    ListColumn,
    RaggedColumn,
    SampleBatch,
    is_number,
    joined_columns,
    patched_column,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.augment import PlacedMap
    from penstock.readers.fieldtypes import Column, FieldType

    Names = Callable[[list[int]], list[str]]

_SALT = 0x3A95F17C  # separates these hashes from those of order, draws and substitutes
_REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class MapTask:
    """Samples for a function. ids: shape (n,). columns: one per field, without views on files."""

    delivery: Delivery
    ids: NDArray[np.int64]
    columns: Sequence[Column]

    def take(self, rows: Sequence[int]) -> MapTask:
        """Return some of the samples."""
        columns = [column.take(rows) for column in self.columns]
        return MapTask(delivery=self.delivery.take(rows), ids=self.ids[rows], columns=columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class MapResult:
    """The result of a task: columns by field, and bad rows with reasons."""

    columns: Mapping[str, Column]
    bad: Mapping[int, str]


class CallFailed(Exception):
    """The error that ended a call. row: of its sample; None if it concerns no single sample."""

    def __init__(self, row: int | None, error: Exception) -> None:
        super().__init__(row, error)
        self.row, self.error = row, error


@dataclass(frozen=True, slots=True, kw_only=True)
class MapCall:
    """A user's function and its declared results. Worker processes get it pickled. seed: keys its
    random numbers, together with the Map's index."""

    map: PlacedMap
    seed: int

    def __call__(self, task: MapTask) -> MapResult:
        """Call the function on all samples of a task. Raises CallFailed."""
        count, bad = len(task.ids), dict[int, str]()
        returns, of = self.map.returns, self.map.op.name
        collectors = {name: Collector(name, type, count, of=of) for name, type in returns.items()}
        if not self.map.op.batched:
            self._each(task, collectors, bad)
        elif count:
            try:
                self._all(task, collectors)
            except BadSampleError as error:
                if count > 1:
                    return self._one_by_one(task)
                bad[0] = _reason(error)
        columns = {name: each.column() for name, each in collectors.items()}
        return MapResult(columns=columns, bad=bad)

    def answer(self, task: MapTask) -> MapResult | CallFailed:
        """Call the function in a worker process. An error is returned, not raised, and can be sent
        back."""
        try:
            return self(task)
        except CallFailed as failed:
            return CallFailed(failed.row, _sendable(failed.error))

    def _each(self, task: MapTask, collectors: dict[str, Collector], bad: dict[int, str]) -> None:
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
                collectors[name].put(row, part)

    def _all(self, task: MapTask, collectors: Mapping[str, Collector]) -> None:
        """Call the function on all samples at once. Raises its BadSampleError."""
        rngs, row = self._generators(task), 0 if len(task.ids) == 1 else None
        value = self._call(list(map(stacked, task.columns)), {"rngs": rngs} if rngs else {}, row)
        for name, part in self._parts(value, row).items():
            collectors[name].put_all(part, row)

    def _one_by_one(self, task: MapTask) -> MapResult:
        """Call a function of batches on each sample of a task alone, to find the bad ones."""
        results: list[MapResult] = []
        for row in range(len(task.ids)):
            try:
                results.append(self(task.take([row])))
            except CallFailed as failed:
                raise CallFailed(row, failed.error) from failed.error
        return _joined(results)

    def _generators(self, task: MapTask) -> list[np.random.Generator]:
        """Return a random generator per sample; none if the function takes none."""
        if not self.map.op.takes_rng:
            return []
        keys = keyed_hash(self.seed, task.delivery.epoch, task.ids, _SALT, self.map.index)
        if task.delivery.occurrences is not None:
            again = keyed_hash(keys, task.delivery.occurrences)
            keys = np.where(task.delivery.occurrences > 0, again, keys)
        return [np.random.Generator(np.random.Philox(key=int(key))) for key in keys]

    def _call(self, arguments: list[Any], more: dict[str, Any], row: int | None) -> Any:
        """Call the function. Raises its BadSampleError, and any other error as CallFailed."""
        try:
            return self.map.op.fn(*arguments, **more)
        except BadSampleError:
            raise
        except Exception as error:  # raised again later, with the sample's name
            name, raised = self.map.op.name, error
            if isinstance(error, StopIteration):  # it would silently end the loader's own loop
                raised = RuntimeError(
                    f"{name} raised StopIteration: does it call next() on an exhausted iterator?"
                )
            elif isinstance(error, ValueError) and re.search("read-only|not writeable", str(error)):
                raised = MapError(
                    f"{name} changes its argument in place, but the array belongs to the "
                    "dataset. Copy it first, as in x = x.copy()."
                )
            raise CallFailed(row, raised) from error

    def _parts(self, value: Any, row: int | None) -> Mapping[str, Any]:
        """Return the function's values by field."""
        names = list(self.map.returns)
        if isinstance(value, Mapping) and set(value) == set(names):
            return value
        if len(names) == 1:
            return {names[0]: value}
        if isinstance(value, tuple | list) and len(value) == len(names):
            return dict(zip(names, value, strict=True))
        got = f"{len(value)} values" if isinstance(value, tuple | list) else type(value).__name__
        wanted = f"a tuple of {len(names)}, or a dict, for {', '.join(names)}"
        raise CallFailed(row, MapError(f"{self.map.op.name} returned {got}, wanted {wanted}."))


def _joined(results: Sequence[MapResult]) -> MapResult:
    """Join the results of the parts of a task, at least one."""
    bad, begin = dict[int, str](), 0
    for each in results:
        bad |= {begin + row: why for row, why in each.bad.items()}
        begin += len(next(iter(each.columns.values())))
    names = results[0].columns
    columns = {name: joined_columns([each.columns[name] for each in results]) for name in names}
    return MapResult(columns=columns, bad=bad)


def _misfit(op: str, field: str, got: str, wanted: str) -> MapError:
    """Return the error for a value that doesn't fit its field. op: the Map's name."""
    return MapError(
        f'{op} returned {got} for "{field}", wanted {wanted}. Convert it in the function, or '
        "declare its type by returns={...} of Map."
    )


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


def without_views(column: Column, type: FieldType) -> Column:
    """Return a column without views on files; samples that aren't decoded become bytes."""
    if not isinstance(column, EncodedColumn):
        return column
    if type.is_image:
        return ListColumn([sample.tobytes() for sample in column.samples])
    return type.column(list(map(type.decoder(), column.samples)))


def samples_of(column: Column) -> Sequence[Any]:
    """Return each sample as a str, bytes, a read-only array, or a numpy scalar."""
    if isinstance(column, DenseColumn):
        values = _private(column.values)
        return [values[row] for row in range(len(values))]
    if isinstance(column, RaggedColumn):
        own = replace(column, values=_private(column.values))
        return [own.sample(row) for row in range(len(own))]
    return [_private(each) if isinstance(each, np.ndarray) else each for each in column.samples]


def stacked(column: Column) -> Any:
    """Return all samples at once: a read-only array if they share a shape, else a list."""
    return _private(column.values) if isinstance(column, DenseColumn) else samples_of(column)


def _private(values: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only copy.

    The flag alone isn't enough, because a tensor over the array could still be written to, and the
    original belongs to the dataset: a mapped file, or memory that is kept for the next epoch.
    """
    copy = values.copy()
    copy.flags.writeable = False
    return copy


_SHOWN = 80  # characters of a value in a message


class Collector:
    """Collects the values of one field, sample by sample; a row without a value is empty or 0."""

    def __init__(self, field: str, type: FieldType, count: int, *, of: str = "") -> None:
        """of: the Map's name, for errors."""
        self._field, self._type, self._of = field, type, of
        form = type.stored or type.decoded
        self._returned = type.returned if form is None or type.is_class else form.returned
        self._is_ragged = form is not None and form.is_ragged
        self._values: Any  # an array, else a list
        if form is not None and not self._is_ragged:
            self._values = np.zeros((count, *form.fixed_shape), form.dtype)
        else:
            self._values = [type.empty if form is None else form.empty] * count

    def put(self, row: int, value: Any) -> None:
        """Set the value of a row. Raises CallFailed."""
        found = self._checked(self._returned, value, row)
        self._values[row] = found.copy() if self._is_ragged else found

    def put_all(self, values: Any, row: int | None) -> None:
        """Set the values of all rows at once. row: of the only sample. Raises CallFailed."""
        own, count = self._values, len(self._values)
        is_many = hasattr(values, "__len__") and hasattr(values, "__getitem__")
        is_scalar = getattr(values, "ndim", 1) == 0
        if not is_many or is_scalar or isinstance(values, str | bytes | Mapping):
            raise self._failed(row, type(values).__name__, f"a list or array of {count}")
        if len(values) != count:
            raise self._failed(row, f"{len(values)} values", f"one a sample: {count}")
        if isinstance(own, np.ndarray) and hasattr(values, "dtype") and not self._type.is_class:
            own[:] = self._checked(ArrayForm(own.dtype, own.shape).returned, values, row)
            return
        for place, value in enumerate(values):
            self.put(place, value)

    def column(self) -> Column:
        """Return the values as a column."""
        own = self._values
        return DenseColumn(own) if isinstance(own, np.ndarray) else self._type.column(own)

    def _checked(self, check: Callable[[Any], Any], value: Any, row: int | None) -> Any:
        try:
            return check(value)
        except ValueError as error:
            got, wanted = error.args
        raise self._failed(row, got or _shown(value), wanted)

    def _failed(self, row: int | None, got: str, wanted: str) -> CallFailed:
        return CallFailed(row, _misfit(self._of, self._field, got, wanted))


def _shown(value: Any) -> str:
    text = repr(value)
    text = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
    return "None" if value is None else f"{text} ({type(value).__name__})"


# Pieces of a batch per process, because samples take different times.
_PIECES = 4


class _MapStage:
    """One Map of the recipe: it calls the function in the reading threads, or in processes.

    workers: the processes; None without any. seconds: wall-clock time that each reading thread has
    spent on it, by the thread's id.
    """

    def __init__(self, placed: PlacedMap, seed: int, names: Names, timeout_s: float) -> None:
        self.map, self.op, self._names = placed, placed.op, names
        self._call = MapCall(map=placed, seed=seed)
        self.workers: WorkerProcesses | None = None
        self.seconds: dict[int, float] = {}
        if (count := self.op.processes) > 0:
            answer = pickle_for_worker(self._call.answer, what=f"The function of {self.op.name}")
            self.workers = WorkerProcesses(count, answer, name=self.op.name, timeout_s=timeout_s)

    def __call__(self, batch: SampleBatch, delivery: Delivery, bad: dict[int, str]) -> SampleBatch:
        """Return a batch with the function's results, as `Mapper` does."""
        began, count = time.perf_counter(), len(batch)
        rows = [row for row in range(count) if row not in bad]
        taken = batch
        if len(rows) < count:
            taken, delivery = batch.take(rows), delivery.take(rows)
        takes = self.map.takes
        columns = [without_views(_column(taken, name), type) for name, type in takes.items()]
        result = self._run(MapTask(delivery=delivery, ids=taken.ids, columns=columns))
        bad |= {rows[place]: why for place, why in result.bad.items()}
        new = dict(result.columns)
        for name, type in self.map.returns.items():
            if type.has_sides:
                self._check_sizes(name, new[name], taken, result.bad)
            if len(rows) < count:  # empty values elsewhere
                nothing = Collector(name, type, count).column()
                new[name] = patched_column(nothing, rows, new[name]) if rows else nothing
        thread = threading.get_ident()
        self.seconds[thread] = self.seconds.get(thread, 0.0) + time.perf_counter() - began
        return replace(batch, columns={**batch.columns, **new})

    def _run(self, task: MapTask) -> MapResult:
        """Call the function on a task: here, or in pieces in the processes."""
        if self.workers is None or not len(task.ids):
            try:
                return self._call(task)
            except CallFailed as failed:
                error = self._error(failed, task.ids.tolist())
            raise error  # here, so that it has no context
        pieces = self._pieces(len(task.ids))
        tasks = [task.take(piece) for piece in pieces]
        results: list[MapResult | CallFailed] = self.workers.run(
            tasks, describe=lambda place: self._describe(tasks[place].ids.tolist())
        )
        whole = list[MapResult]()
        for piece, result in zip(pieces, results, strict=True):
            if isinstance(result, CallFailed):
                raise self._error(result, task.ids[piece.start :].tolist())
            whole.append(result)
        return _joined(whole)

    def _pieces(self, count: int) -> list[range]:
        """Return the rows of each task of a process.

        A function of batches gets the whole batch, so that its arguments don't depend on the number
        of processes.
        """
        tasks = 1 if self.op.batched else _PIECES * max(1, self.op.processes)
        length = max(1, -(-count // tasks))
        return [range(start, min(start + length, count)) for start in range(0, count, length)]

    def _check_sizes(
        self, name: str, masks: Column, taken: SampleBatch, bad: Mapping[int, str]
    ) -> None:
        """Raise MapError for a mask of another size than its image. bad: rows without a mask."""
        image = self.map.returns[name].reference
        images = taken.columns.get(image or "")
        if not isinstance(images, EncodedColumn) or images.dims is None:
            return
        assert isinstance(masks, ListColumn)
        present = taken.present.get(name)
        for row, mask in enumerate(masks.samples):
            size = tuple(images.dims[row].tolist())
            is_missing = row in bad or (present is not None and not present[row])
            if not is_missing and mask.shape != size:
                got, wanted = f"a mask of shape {mask.shape}", f'{size}, as "{image}" is'
                misfit = _misfit(self.op.name, name, got, wanted)
                raise self._error(CallFailed(row, misfit), taken.ids.tolist())

    def _error(self, failed: CallFailed, ids: list[int]) -> Exception:
        """Return the error of a failed call, with the sample's name. ids: of the task's samples."""
        error, row = failed.error, failed.row
        if row is None:
            error.add_note(f"while {self._describe(ids)}")
            return error
        sample_id = ids[row]
        sample = f"sample {sample_id}"
        with contextlib.suppress(PenstockError):  # a shard can't be opened: the id has to suffice
            sample += f" ({self._names([sample_id])[0]})"
        if isinstance(error, MapError):
            return MapError(f"At {sample}: {error}", sample_id=sample_id)
        error.add_note(f"while {self.op.name} was processing {sample}")
        return error

    def _describe(self, ids: Sequence[int]) -> str:
        """Describe a task for errors."""
        shown = ", ".join(map(str, ids[:8])) + (", …" if len(ids) > 8 else "")
        return f"{self.op.name} of the samples {shown}"


class Mapper:
    """Calls the functions of a recipe's Maps on batches. Any thread may call it.

    The results depend only on the samples, the seed and the epoch, not on the number of threads or
    processes.
    """

    def __init__(
        self,
        maps: Sequence[PlacedMap],
        *,
        seed: int,
        names: Names,
        timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        """names: returns the names of samples, for errors. timeout_s: for one task of a process.

        Raises NotPicklableError for a function that can't be sent to processes.
        """
        self._stages = [_MapStage(each, seed, names, timeout_s) for each in maps]

    @property
    def is_random(self) -> bool:
        """True if a sample's result may differ between epochs."""
        return any(stage.op.takes_rng for stage in self._stages)

    @property
    def threads(self) -> int:
        """The number of reading threads that keep all processes busy; 0 without processes."""
        ops = [stage.op for stage in self._stages if stage.workers]
        return max((op.processes if op.batched else 1 for op in ops), default=0)

    @property
    def pids(self) -> list[int]:
        """The ids of its processes."""
        return [pid for stage in self._stages if stage.workers for pid in stage.workers.pids]

    def __call__(
        self,
        content: SampleBatch,
        *,
        epoch: int | NDArray[np.int64],
        bad: dict[int, str],
        occurrences: NDArray[np.int64] | None = None,
    ) -> SampleBatch:
        """Return the samples with the results of the functions.

        epoch, occurrences: as in `Delivery`.

        bad: rows that the functions don't get, with reasons. Rows for which a function raises
        BadSampleError are added; their new values are empty. Raises MapError for a result that
        doesn't fit its declared type; the errors of the functions, with the sample's name; and the
        errors of `WorkerProcesses.run`.
        """
        delivery = Delivery(epoch, occurrences)
        for stage in self._stages:
            content = stage(content, delivery, bad)
        return content

    def facts(self) -> MapFacts:
        """Return the time of all functions so far, and the settings of the slowest."""
        seconds = [sum(list(stage.seconds.values())) for stage in self._stages]
        op = self._stages[int(np.argmax(seconds))].op
        return MapFacts(
            name=op.name, seconds=sum(seconds), processes=op.processes, batched=op.batched
        )

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        for stage in self._stages:
            if stage.workers is not None:
                stage.workers.close()


def joined_facts(mappers: Sequence[Mapper]) -> MapFacts:
    """Return the time of the functions of several recipes, and the settings of the slowest one."""
    found = [mapper.facts() for mapper in mappers]
    slowest = max(found, key=lambda each: each.seconds)
    return replace(slowest, seconds=sum(each.seconds for each in found))


def _column(batch: SampleBatch, name: str) -> Column:
    if name in batch.columns:
        return batch.columns[name]
    if is_number(name, batch.columns):
        return DenseColumn(batch.ids)
    return DenseColumn(batch.has(name.removesuffix(PRESENT)))
