"""The errors that Penstock raises, and its one class of warnings.

`except penstock.errors.PenstockError` catches all of them. Each is also the builtin error that its
line names, so `except FileNotFoundError` works too. `penstock.cache.errors` draws the tree, and
says what each error carries.
"""

from __future__ import annotations

from penstock.cache import (
    BadSampleError,
    ClosedError,
    ConfigError,
    CorruptSampleError,
    CorruptShardError,
    DatasetError,
    DatasetNotFoundError,
    DestinationError,
    DeviceError,
    FetchError,
    ForkedError,
    IndexChangedError,
    JobStoreError,
    MapError,
    MissingDependencyError,
    NotPicklableError,
    ObjectChangedError,
    OtherVersionError,
    PenstockError,
    PenstockWarning,
    PlanError,
    RankFailedError,
    ReadError,
    RecipeError,
    ResumeError,
    StalledError,
    TooManyBadSamplesError,
    WorkerError,
    WriteError,
)

__all__ = [
    "BadSampleError",
    "ClosedError",
    "ConfigError",
    "CorruptSampleError",
    "CorruptShardError",
    "DatasetError",
    "DatasetNotFoundError",
    "DestinationError",
    "DeviceError",
    "FetchError",
    "ForkedError",
    "IndexChangedError",
    "JobStoreError",
    "MapError",
    "MissingDependencyError",
    "NotPicklableError",
    "ObjectChangedError",
    "OtherVersionError",
    "PenstockError",
    "PenstockWarning",
    "PlanError",
    "RankFailedError",
    "ReadError",
    "RecipeError",
    "ResumeError",
    "StalledError",
    "TooManyBadSamplesError",
    "WorkerError",
    "WriteError",
]
