"""Define the tree of errors that Penstock raises; each of them is also a builtin error.

Any layer may import this module.

    PenstockError
    ├── ConfigError (ValueError)         an argument, or two that contradict each other
    │   ├── PlanError                    sizes, lanes, window, batch and world don't fit
    │   └── RecipeError                  operations don't fit their data
    │       └── MapError                 a function didn't return what it said; carries .sample_id
    ├── DatasetError (ValueError)        the dataset can't be used as it is
    │   ├── DatasetNotFoundError (FileNotFoundError)   nothing there, or nothing in it
    │   ├── IndexChangedError            files no longer match the index
    │   ├── OtherVersionError            an index or a pack that another Penstock wrote
    │   ├── CorruptShardError            bytes came, but aren't what the index promised
    │   │   └── CorruptSampleError       one sample of a shard; carries .sample_id
    │   ├── BadSampleError               a user's code says so of the sample at hand
    │   └── TooManyBadSamplesError       more than max_bad of an epoch; carries .sample_ids
    ├── FetchError (OSError)             a remote object was not fetched; carries .uri, .missing
    │   └── ObjectChangedError           it isn't the version that was indexed any more
    ├── DestinationError (FileExistsError)   a destination holds other data
    ├── ReadError (OSError)              a local file can't be read: the machine's fault, no data's
    ├── WriteError (OSError)             a file of ours could not be written (disk full, read-only)
    ├── ResumeError (ValueError)         a state that can't be honoured
    ├── MissingDependencyError (ImportError)   an optional package; names the extra
    ├── DeviceError (RuntimeError)       the GPU, its driver or DALI failed; no sample is to blame
    ├── NotPicklableError (TypeError)     something that lives in one process
    ├── WorkerError (RuntimeError)       a worker died, or whoever hands it work doesn't answer
    ├── StalledError (TimeoutError)      a wait passed its limit
    ├── RankFailedError (RuntimeError)   another rank's loader failed; carries .rank
    ├── JobStoreError (RuntimeError)     the store of the job's processes doesn't answer
    └── ClosedError (RuntimeError)       used after close()
        └── ForkedError                  used in a forked child of the process that made it

A message says four things: what, got, wanted, do this.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.cache.secrets import safe_text

if TYPE_CHECKING:
    from collections.abc import Callable

C = TypeVar("C", bound="Callable[..., Any]")


def _safe(args: tuple[object, ...], *, one_line: bool) -> tuple[object, ...]:
    return tuple(safe_text(a, one_line=one_line) if isinstance(a, str) else a for a in args)


class PenstockError(Exception):
    """The base of all errors that Penstock raises on purpose.

    A message may be shown to anybody: URLs in it have no credentials, names from elsewhere no
    control characters.
    """

    _has_lines = False

    def __init__(self, *args: object) -> None:
        super().__init__(*_safe(args, one_line=not self._has_lines))


class ConfigError(PenstockError, ValueError):
    """An argument is wrong, or two arguments contradict each other."""


class PlanError(ConfigError):
    """Sizes, lanes, window, batch and world don't fit together."""


class RecipeError(ConfigError):
    """Operations of a recipe don't fit one another or the data."""


class MapError(RecipeError):
    """A function of a recipe's Map returned what it didn't declare, or changed what it was given.

    sample_id: position in the index; None where it isn't one sample's.
    """

    def __init__(self, message: str, *, sample_id: int | None = None) -> None:
        super().__init__(message)
        self.sample_id = sample_id


class DatasetError(PenstockError, ValueError):
    """The dataset can't be used as it is."""


class DatasetNotFoundError(DatasetError, FileNotFoundError):
    """There is nothing at the URL, or nothing that can be read."""

    # OSError's __str__ wants (errno, strerror); ours carries one message.
    __str__ = Exception.__str__

    def __new__(cls, *args: object) -> DatasetNotFoundError:
        """Its memory is an OSError's: those who make errors anew by name (Dask) ask for that."""
        return OSError.__new__(cls, *args)


class IndexChangedError(DatasetError):
    """The files no longer match the index that was built over them."""


class OtherVersionError(DatasetError):
    """An index or a pack is in a format that this version doesn't read."""


class CorruptShardError(DatasetError):
    """The bytes of a shard came, but they aren't what the index promised."""


class CorruptSampleError(CorruptShardError):
    """The bytes of one sample aren't what the index promised, or don't decode.

    sample_id: position in the index.
    """

    def __init__(self, message: str, *, sample_id: int) -> None:
        super().__init__(message)
        self.sample_id = sample_id


class BadSampleError(DatasetError):
    """Code of the user's, a Map's function or a torch dataset, says that a sample can't be used.

    The loader takes another in its place, within max_bad. The message says why.
    """


class TooManyBadSamplesError(DatasetError):
    """More samples of an epoch were bad than `max_bad` allows.

    sample_ids: the bad ones that this rank and the one that passed the limit know of.
    """

    _has_lines = True

    def __init__(self, message: str, *, sample_ids: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.sample_ids = sample_ids


class FetchError(PenstockError, OSError):
    """A remote object could not be listed or fetched.

    uri: which one; missing: it isn't there.
    """

    __str__ = Exception.__str__

    def __init__(self, message: str, *, uri: str, missing: bool = False) -> None:
        super().__init__(message)
        self.uri = uri
        self.missing = missing


class ObjectChangedError(FetchError):
    """A remote object changed while it was read; bytes of two versions are never mixed."""


class DestinationError(PenstockError, FileExistsError):
    """A destination holds other data already; nothing was touched."""

    __str__ = Exception.__str__


class ReadError(PenstockError, OSError):
    """A local file that is there can't be read or examined: too many open files, no memory, a disk
    or mount that fails, missing rights. No data is to blame. errno: the system's number, or None.
    """

    __str__ = Exception.__str__

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class WriteError(PenstockError, OSError):
    """A file of ours could not be written: the disk is full, or the folder read-only."""

    __str__ = Exception.__str__


class ResumeError(PenstockError, ValueError):
    """A state can't be honoured by this dataset, seed or version."""


class MissingDependencyError(PenstockError, ImportError):
    """An optional package isn't installed; the message names the extra."""


class DeviceError(PenstockError, RuntimeError):
    """The GPU, its driver, DALI or memory failed; no sample's bytes are to blame."""


class NotPicklableError(PenstockError, TypeError):
    """The object lives in one process, and can't be sent to another."""


class WorkerError(PenstockError, RuntimeError):
    """A worker died: a process of a torch dataset's or a Map's, an executor's worker, the server of
    a cache; or its executor takes no work."""

    _has_lines = True


class StalledError(PenstockError, TimeoutError):
    """A wait passed its time limit."""

    __str__ = Exception.__str__


class RankFailedError(PenstockError, RuntimeError):
    """The loader of another rank failed, so this one stops at the same step. rank: which one."""

    _has_lines = True

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class JobStoreError(PenstockError, RuntimeError):
    """The store through which the processes of a job tell one another things doesn't answer."""


class ClosedError(PenstockError, RuntimeError):
    """The object was used after close()."""


class ForkedError(ClosedError):
    """The object was used in a forked child of its process, where its threads aren't."""


class PenstockWarning(UserWarning):
    """Penstock's one warning class: something works, but not as well as it could."""

    def __init__(self, *args: object) -> None:
        super().__init__(*_safe(args, one_line=False))


def explain_arguments(error: type[ConfigError]) -> Callable[[C], C]:
    """Return a decorator of a class or a function: calls whose arguments don't fit raise `error`,
    not TypeError.

    The message names the argument, the nearest one that exists, and all that exist.
    """

    def decorate(called: C) -> C:
        is_class = isinstance(called, type)
        inner: Any = called.__init__ if is_class else called

        @functools.wraps(inner)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                return inner(*args, **kwargs)
            except TypeError:
                if words := _wrong_arguments(called, args[is_class:], kwargs):
                    raise error(words) from None
                raise

        if not is_class:
            return cast("C", checked)
        setattr(called, "__init__", checked)  # noqa: B010  # mypy refuses the plain assignment
        return called

    return decorate


def _wrong_arguments(
    called: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """Return how a call misses a signature; None where it fits."""
    name_of = called.__name__
    parameters = inspect.signature(called).parameters
    placed = [name for name, one in parameters.items() if one.kind is not one.KEYWORD_ONLY]
    listed = f"Its arguments are {', '.join(parameters)}." if parameters else "It has none."
    for name in kwargs:
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1)
            hint = f", did you mean {near[0]!r}?" if near else "."
            return f"{name_of} has no argument {name!r}{hint} {listed}"
        if name in placed[: len(args)]:
            return f"{name_of}: got {name!r} twice, by its place and by its name. {listed}"
    if len(args) > len(placed):
        return (
            f"{name_of}: got {len(args)} arguments by their place, wanted {len(placed)} at "
            f"most. {listed}"
        )
    missing = [
        name
        for name, one in parameters.items()
        if one.default is one.empty and name not in placed[: len(args)] and name not in kwargs
    ]
    return f"{name_of}: {', '.join(missing)} is missing. {listed}" if missing else None
