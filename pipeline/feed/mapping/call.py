"""One call of a user's function on some samples: the same in a thread and in a worker process."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.cache.base.hashing import keyed_hash
from penstock.cache.errors import BadSampleError, MapError, WorkerError
from penstock.pipeline.feed.mapping.arguments import generators, samples_of, stack_of
from penstock.pipeline.feed.mapping.results import MisfitError, collector

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.pipeline.feed.mapping.results import Collector
    from penstock.readers.fields.columns import Column
    from penstock.readers.fields.field_types import FieldType

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
class Failure:
    """What stopped a function. row: at which sample; None: at none of them alone."""

    row: int | None
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class MapResult:
    """What became of a task: columns by field; bad: rows that the function called bad, and why;
    or a failure."""

    columns: Mapping[str, Column] = field(default_factory=dict)
    bad: Mapping[int, str] = field(default_factory=dict)
    failure: Failure | None = None


class _Stop(Exception):
    """Carries a failure out of a loop over samples."""

    def __init__(self, row: int | None, error: Exception) -> None:
        super().__init__(row)
        self.failure = Failure(row=row, error=error)


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
        except _Stop as stop:
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
        value = self._called(list(map(stack_of, task.columns)), {"rngs": rngs} if rngs else {}, row)
        parts = self._parts(value, row)
        for name, part in parts.items():
            is_many = hasattr(part, "__len__") and hasattr(part, "__getitem__")
            if not is_many or isinstance(part, str | bytes | Mapping) or not _ndim(part):
                raise _Stop(
                    row, self.misfit(name, type(part).__name__, f"a list or array of {count}")
                )
            if len(part) != count:
                raise _Stop(row, self.misfit(name, f"{len(part)} values", f"one a sample: {count}"))
        return parts

    def _generators(self, task: MapTask) -> list[np.random.Generator]:
        """The samples' own random numbers; none where the function doesn't take them."""
        if not self.takes_rng:
            return []
        return generators(keyed_hash(self.seed, task.epoch, task.ids, _SALT, self.index))

    def _called(self, arguments: list[Any], more: dict[str, Any], row: int | None) -> Any:
        try:
            return self.fn(*arguments, **more)
        except BadSampleError:
            raise
        except StopIteration as error:  # it would end the loader's own loop, and nobody would know
            told = RuntimeError(f"{self.name} raised StopIteration: a next() of an iterator's end?")
            raise _Stop(row, told) from error
        except ValueError as error:
            if "read-only" in str(error) or "not writeable" in str(error):
                raise _Stop(
                    row,
                    MapError(
                        f"{self.name} changes what it was given in place, and that is the "
                        "dataset's: copy it first, as in x = x.copy()."
                    ),
                ) from error
            raise _Stop(row, error) from error
        except Exception as error:  # the user's: raised again, with the sample named
            raise _Stop(row, error) from error

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
        raise _Stop(row, MapError(f"{self.name} returned {got}, wanted {wanted}."))

    def misfit(self, field: str, got: str, wanted: str) -> MapError:
        """The error for what was returned for a field."""
        return MapError(
            f'{self.name} returned {got} for "{field}", wanted {wanted}. Convert it there, or say '
            "what it is: returns={...} of Map."
        )

    def _unfit(self, field: str, row: int | None, error: MisfitError) -> _Stop:
        """What to raise where a value doesn't fit a field."""
        at = error.row if row is None else row
        return _Stop(at, self.misfit(field, error.got, error.wanted))


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """A call for worker processes: what it raises can be sent back."""

    call: MapCall

    def __call__(self, task: MapTask) -> MapResult:
        result = self.call(task)
        failure = result.failure
        if failure is None:
            return result
        return MapResult(failure=Failure(row=failure.row, error=_sendable(failure.error)))


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
