"""Define the log, and the tree of errors that Penstock raises; each is also a builtin error.

Any layer may import this module.

    PenstockError
    ├── ConfigError (ValueError)         an argument, or two that contradict each other
    │   ├── PlanError                    sizes, lanes, window, batch and world don't fit
    │   └── RecipeError                  operations don't fit their data
    │       └── MapError                 a Map's result isn't what it declared; carries .sample_id
    ├── DatasetError (ValueError)        the dataset can't be used as it is
    │   ├── DatasetNotFoundError (FileNotFoundError)   the URL doesn't exist or has no data
    │   ├── IndexChangedError            files no longer match the index
    │   ├── OtherVersionError            another version wrote the index or the pack
    │   ├── CorruptShardError            a shard's bytes don't match the index
    │   │   └── CorruptSampleError       one sample of a shard; carries .sample_id
    │   ├── BadSampleError               the user's code rejected a sample
    │   └── TooManyBadSamplesError       an epoch has more than max_bad; carries .sample_ids
    ├── FetchError (OSError)             a remote object was not fetched; carries .uri, .missing
    │   └── ObjectChangedError           the object is no longer the version that was indexed
    ├── DestinationError (FileExistsError)   a destination holds other data
    ├── ReadError (OSError)              a local file can't be read because the machine fails
    ├── WriteError (OSError)             a file could not be written (disk full, read-only)
    ├── ResumeError (ValueError)         a state doesn't fit this dataset, seed or version
    ├── MissingDependencyError (ImportError)   an optional package is missing; names the extra
    ├── DeviceError (RuntimeError)       the GPU, its driver or DALI failed; no sample is to blame
    ├── NotPicklableError (TypeError)    the object belongs to one process
    ├── WorkerError (RuntimeError)       a worker died, or its executor doesn't answer
    ├── StalledError (TimeoutError)      a wait passed its limit
    ├── RankFailedError (RuntimeError)   another rank's loader failed; carries .rank
    ├── JobStoreError (RuntimeError)     the job's key-value store doesn't answer
    └── ClosedError (RuntimeError)       used after close()
        └── ForkedError                  used in a forked child of the process that created it

A message says four things: what failed, what it got, what it expected, and what to do.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import warnings
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.cache.secrets import safe_text

if TYPE_CHECKING:
    from collections.abc import Callable

C = TypeVar("C", bound="Callable[..., Any]")


def _safe(args: tuple[object, ...], *, one_line: bool) -> tuple[object, ...]:
    return tuple(safe_text(a, one_line=one_line) if isinstance(a, str) else a for a in args)


log = logging.getLogger("penstock")
"""The logger of all messages."""


class PenstockError(Exception):
    """The base of all errors that Penstock raises on purpose.

    Catch it where a program handles every failure of the input pipeline in one way. Every message
    can be shown to others: credentials are removed from URLs, and control characters in names are
    escaped.
    """

    _has_lines = False
    __str__ = Exception.__str__  # OSError's expects (errno, strerror); these carry one message

    def __init__(self, *args: object) -> None:
        super().__init__(*_safe(args, one_line=not self._has_lines))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the error with its data, which may be keyword arguments of its class."""
        number = {"errno": self.errno} if isinstance(self, OSError) else {}
        return _recreate, (type(self), self.args, {**self.__dict__, **number})


def _recreate(
    kind: type[PenstockError], args: tuple[object, ...], data: dict[str, Any]
) -> PenstockError:
    error = kind.__new__(kind, *args)
    error.args = args
    for name, value in data.items():
        setattr(error, name, value)
    return error


class ConfigError(PenstockError, ValueError):
    """An argument is wrong, or two arguments contradict each other.

    Penstock raises it before any work starts, unless only the data show the contradiction, such as
    a sample longer than the rows of `PackTokens`. The message names the argument, the value that it
    got and the values that it accepts: change the call.
    """


class PlanError(ConfigError):
    """Sizes, lanes, window, batch and world don't fit together.

    Change the number that the message names, usually the batch size: each rank must get a sample
    of each global batch, and an epoch must have a batch. `penstock plan` shows which sizes fit a
    number of nodes.
    """


class RecipeError(ConfigError):
    """Operations of a recipe don't fit each other or the data.

    Change the order of the operations, or add the one that the message names, such as a crop that
    gives all images of a batch one size. `penstock inspect --batch` shows what a recipe delivers.
    """


class MapError(RecipeError):
    """The function of a recipe's Map returned a type or shape that the Map doesn't declare, or
    changed its input.

    Declare in `returns=` what the function returns, or correct the function. Copy an input before
    you change it.

    sample_id: position in the index; None if the error concerns no single sample.
    """

    def __init__(self, message: str, *, sample_id: int | None = None) -> None:
        super().__init__(message)
        self.sample_id = sample_id


class DatasetError(PenstockError, ValueError):
    """The dataset can't be used as it is.

    The message names the file and what is wrong with it. Correct the data, or the arguments of
    `Dataset` that describe it. `penstock inspect` lists what Penstock found.
    """


class DatasetNotFoundError(DatasetError, FileNotFoundError):
    """The URL doesn't exist, or holds nothing that can be read.

    Check the path, and for a store the bucket's name, the region and the credentials;
    `penstock doctor --url URL` tries the connection.
    """

    def __new__(cls, *args: object) -> DatasetNotFoundError:
        """Allocate as OSError does, which code requires that recreates errors by name (Dask)."""
        return OSError.__new__(cls, *args)


class IndexChangedError(DatasetError):
    """The files no longer match the index that was built over them.

    If the change was intended, build the index again with `penstock index`. A job that was saved
    before the change can't resume.
    """


class OtherVersionError(DatasetError):
    """An index or a pack is in a format that this version doesn't read.

    Build the index or the pack again with this version, or install the version that the message
    names.
    """


class CorruptShardError(DatasetError):
    """The bytes of a shard were read, but they don't match the index.

    Copy the file again from its source, or pack the dataset again. In a cache, Penstock has already
    fetched the bytes a second time, so the source itself is damaged.
    """


class CorruptSampleError(CorruptShardError):
    """The bytes of one sample don't match the index, or can't be decoded.

    A loader replaces such a sample and lists it in its quarantine file; reading the sample by
    itself, as in `dataset[i]`, raises this error. Replace the file, or leave the sample out with
    `subset`.

    sample_id: position in the index.
    """

    def __init__(self, message: str, *, sample_id: int) -> None:
        super().__init__(message)
        self.sample_id = sample_id


class BadSampleError(DatasetError):
    """The user's code, a Map's function or a torch dataset, rejected a sample.

    Raise it in your own code for a sample that can't be used. The loader replaces it with another
    sample, up to the share `max_bad`. The message gives the reason.
    """


class TooManyBadSamplesError(DatasetError):
    """More samples of an epoch were bad than `max_bad` allows.

    All ranks stop at the same step. Look at the samples that the message lists, correct the data or
    your function, or raise `max_bad` if the loss is acceptable.

    sample_ids: the bad samples known to this rank and to the rank that passed the limit.
    """

    _has_lines = True

    def __init__(self, message: str, *, sample_ids: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.sample_ids = sample_ids


class FetchError(PenstockError, OSError):
    """A remote object could not be listed or fetched.

    Check the network, the credentials and the region, then resume the job: its position is in its
    last state. `penstock doctor --url URL` finds the cause.

    uri: the object's URI. missing: True if the object doesn't exist.
    """

    def __init__(self, message: str, *, uri: str, missing: bool = False) -> None:
        super().__init__(message)
        self.uri = uri
        self.missing = missing


class ObjectChangedError(FetchError):
    """A remote object changed while it was read; bytes of two versions are never mixed.

    Don't overwrite data that jobs read: write a new version under a new name. Build the index again
    if the change was intended.
    """


class DestinationError(PenstockError, FileExistsError):
    """A destination already holds other data; nothing was changed.

    Choose another folder, or delete this one.
    """


class ReadError(PenstockError, OSError):
    """An existing local file can't be read or examined: too many open files, no memory, a failing
    disk or mount, or missing permissions. The data didn't cause it.

    Repair what the message names on this machine, such as the limit of `ulimit -n`, and resume.
    `penstock doctor` checks the machine.

    errno: the system's error number, or None.
    """

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class WriteError(PenstockError, OSError):
    """Penstock could not write a file: the disk is full, or the folder is read-only.

    Free space on that disk, or pass another folder. The same call resumes an index or a pack.
    """


class ResumeError(PenstockError, ValueError):
    """A state doesn't fit this dataset, seed or version, so the job can't resume from it.

    The message names what differs. Pass the dataset, the seed and the recipe of the saved job, or
    start the epoch again without a state. The loader is unchanged.
    """


class MissingDependencyError(PenstockError, ImportError):
    """An optional package isn't installed; the message names the extra.

    Install it, such as `pip install 'penstock[zarr]'`.
    """


class DeviceError(PenstockError, RuntimeError):
    """The GPU, its driver, DALI or memory failed; no sample's bytes caused it.

    Run `penstock doctor`. If memory ran out, use a smaller batch or a lower prefetch_factor.
    """


class NotPicklableError(PenstockError, TypeError):
    """The object belongs to one process and can't be sent to another.

    Create the loader or the cache in each process; send its URL or its arguments instead.
    """


class WorkerError(PenstockError, RuntimeError):
    """A worker died (a process of a torch dataset or a Map, a worker of an executor, the server of
    a cache), or its executor accepts no tasks.

    The message ends with the worker's own error, if it left one. A worker that the system killed
    has usually run out of memory: use fewer workers.
    """

    _has_lines = True


class StalledError(PenstockError, TimeoutError):
    """A wait passed its time limit.

    The message names what was waited for. If the store or the other ranks are only slow, raise
    `timeout=`.
    """


class RankFailedError(PenstockError, RuntimeError):
    """The loader of another rank failed, so this one stops at the same step.

    Read the error of the rank that the message names; this one needs no change.

    rank: the number of that rank.
    """

    _has_lines = True

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class JobStoreError(PenstockError, RuntimeError):
    """The key-value store through which a job's processes communicate doesn't answer.

    The process that serves it, usually that of rank 0, has ended or can't be reached, or the nodes
    run different versions of Penstock. Start the job again: it continues from its last state.
    """


class ClosedError(PenstockError, RuntimeError):
    """The object was used after close().

    Create a new one, or close it later: usually after the loop, at the end of its `with` block.
    """


class ForkedError(ClosedError):
    """The object was used in a forked child of its process, which doesn't have its threads.

    Create the object in the child, or start the child with the method "spawn".
    """


class PenstockWarning(UserWarning):
    """Penstock's one warning class: something works, but not as well as it could.

    The message says what to change. `warnings.filterwarnings` silences it or makes it an error, as
    it does with any other warning.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*_safe(args, one_line=False))


def warn(message: str, *, stacklevel: int = 1) -> None:
    """Warn by a PenstockWarning. stacklevel: that of `warnings.warn`, which counts from the
    caller."""
    warnings.warn(message, PenstockWarning, stacklevel=stacklevel + 1)


def error_of_kind(kind: str, message: str, *, default: type[PenstockError]) -> PenstockError:
    """Create an error of another process by the name of its class. default: the class if Penstock
    has no such error, or if it needs more than a message."""
    try:
        made = globals().get(kind, default)(message)
    except TypeError:
        made = default(message)
    assert isinstance(made, PenstockError)
    return made


_TRANSFORMS = ("transform", "transforms", "augmentation", "augmentations")
"""Names in other libraries of the argument that has a recipe."""


def explain_arguments(error: type[ConfigError]) -> Callable[[C], C]:
    """Return a decorator of a class or function whose calls raise `error` instead of TypeError if
    the arguments don't match the signature.

    The message names the argument, the most similar name, and all names.
    """

    def decorate(called: C) -> C:
        is_class = isinstance(called, type)
        inner: Any = called.__init__ if is_class else called

        @functools.wraps(inner)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                return inner(*args, **kwargs)
            except TypeError:
                if message := _wrong_arguments(called, args[is_class:], kwargs):
                    raise error(message) from None
                raise

        if not is_class:
            return cast("C", checked)
        setattr(called, "__init__", checked)  # noqa: B010  # mypy refuses the plain assignment
        return called

    return decorate


def _wrong_arguments(
    called: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """Return the message for arguments that don't match a signature; None if they match."""
    signature, name_of = inspect.signature(called), called.__name__
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        reason = f"{name_of}: {error}."
    else:
        return None
    for name in kwargs:
        if name not in signature.parameters:
            if name in _TRANSFORMS:
                is_here = "augment" in signature.parameters
                near = ["augment"] if is_here else []
                hint = "." if is_here else "; DataLoader's augment= has the operations."
            else:
                near, hint = difflib.get_close_matches(name, signature.parameters, n=1), "."
            hint = f", did you mean {near[0]!r}?" if near else hint
            reason = f"{name_of} has no argument {name!r}{hint}"
    listed = ", ".join(signature.parameters)
    return f"{reason} {f'Its arguments are {listed}.' if listed else 'It has none.'}"
