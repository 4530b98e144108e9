"""Define, check, write and read the manifest of an index: an Arrow table with one row per shard,
and in its metadata, as JSON, the facts that hold for all shards.

The same class describes data that doesn't carry its index (rows name sidecars) and a pack (rows
name shard files). A manifest may come from an untrusted source, with a valid checksum: each value
is checked here, once, before anything is sized by it. The file is memory-mapped and O(shards). It
contains a checksum of itself, because a flipped bit would silently change the dataset.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from dataclasses import fields as dataclass_fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.cache import (
    CorruptShardError,
    DatasetError,
    MissingDependencyError,
    OtherVersionError,
    ReadError,
)
from penstock.readers.fieldtypes import FieldType, Schema
from penstock.readers.files import (
    BROKEN,
    LazyColumn,
    are_unsafe,
    damaged_file_error,
    map_buffer,
    metadata,
    only_batch,
    printable,
    read_buffer,
    write_batch,
)
from penstock.readers.formats import (
    MAX_BYTES,
    MAX_SAMPLES,
    MAX_SHARD_BYTES,
    MAX_SHARD_SAMPLES,
    MAX_SIDE,
    STORAGES,
    VERSION,
    FieldSummary,
    SampleLayout,
    ShardEntry,
    Sums,
    format_named,
    is_format,
)
from penstock.readers.types import ImageRange, Ints, Numbers
from penstock.version import __version__

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.formats import Format, ShardSummary
    from penstock.readers.origin import Entry, LeftOut, Origin


SIDECARS = b"sidecars"
"""The folder of the sidecars, in the index's folder."""

_NAMED_IN_MANIFEST = re.compile(rb"sidecars/[0-9a-f]{16}-\d{6,12}(-[0-9a-f]{32})?\.arrow")


def is_sidecar_name(name: bytes) -> bool:
    """Return True if a manifest may contain this name of a sidecar."""
    return _NAMED_IN_MANIFEST.fullmatch(name) is not None


_MAX_NAME = 4096

_Check = Callable[[Any], bool]


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_text(most: int = _MAX_NAME) -> _Check:
    return lambda value: isinstance(value, str) and len(value) <= most


def _optional(is_right: _Check) -> _Check:
    return lambda value: value is None or is_right(value)


def _is_list(is_right: _Check, *, most: int = 2**31) -> _Check:
    return lambda x: isinstance(x, list) and len(x) <= most and all(map(is_right, x))


def _is_mapping(is_right: _Check) -> _Check:
    return lambda value: isinstance(value, dict) and all(map(is_right, value.values()))


def _is_pair(first: _Check, second: _Check) -> _Check:
    return lambda x: isinstance(x, list) and len(x) == 2 and first(x[0]) and second(x[1])


def _is_within(least: float, most: float) -> _Check:
    """Return a check of an integer."""
    return lambda value: type(value) is int and least <= value <= most


_is_count = _is_within(0, MAX_SAMPLES)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, bool) and (
        math.isfinite(value) if isinstance(value, float) else abs(value) < 2**64
    )


def _is_ascending(is_right: _Check) -> _Check:
    is_pair = _is_pair(is_right, is_right)
    return lambda value: is_pair(value) and value[0] <= value[1]


def _is_range(value: Any) -> bool:
    names = ("min_height", "max_height", "min_width", "max_width")
    if not isinstance(value, dict) or set(value) != set(names):
        return False
    sides, is_right = [value[name] for name in names], _is_ascending(_is_within(1, MAX_SIDE))
    return is_right(sides[:2]) and is_right(sides[2:])


def _is_match(pattern: str) -> _Check:
    is_text = re.compile(pattern).fullmatch
    return lambda value: isinstance(value, str) and is_text(value) is not None


def _checked(values: Any, checks: Mapping[str, _Check], whose: str) -> dict[str, Any]:
    """Check untrusted values by name, and return them with tuples instead of lists. Raises
    ValueError."""
    if not isinstance(values, dict):
        raise ValueError(f"{whose} facts can't be {str(values)[:80]!r}")
    for name, is_right in checks.items():
        if name in values and not is_right(values[name]):
            raise ValueError(f"{whose} {name} can't be {str(values[name])[:80]!r}")
    return {name: _frozen(value) for name, value in values.items()}


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


_SUMMARY_CHECKS: dict[str, _Check] = {
    "storage": lambda value: value in STORAGES,
    "missing": _is_count,
    "images": _optional(_is_range),
    "channels": _is_list(_is_within(0, 2**16), most=2**17),
    "codecs": _is_list(_is_text(64), most=2**10),
    "lengths": _is_list(_is_ascending(_is_within(0, MAX_SHARD_BYTES)), most=32),
    "bounds": _optional(_is_ascending(_is_number)),
    "progressive": _optional(_is_count),
}


def check_summary(values: Any) -> FieldSummary:
    """Parse the summary of a field from untrusted JSON. Raises ValueError, TypeError."""
    found = _checked(values, _SUMMARY_CHECKS, "a field's")
    if found.get("images") is not None:
        found["images"] = ImageRange(**found["images"])
    return FieldSummary(**found)


def check_fit(summary: FieldSummary, type: FieldType, *, samples: int) -> None:
    """Raise ValueError if a field of this type can't have this summary."""
    is_number = type.number is not None
    if (summary.storage == "value") > is_number:
        raise ValueError(f"{type.kind} isn't a number")
    if summary.missing > samples:
        raise ValueError(f"{summary.missing:,} of {samples:,} samples lack a field")
    is_there = summary.missing < samples
    if summary.storage == "chunks":
        return
    if type.has_sides and is_there != (summary.images is not None):
        raise ValueError(f"{type.kind} without bounds of its heights and widths")
    form = type.form
    if form is not None and summary.lengths and len(summary.lengths) != len(form.shape):
        raise ValueError(f"{len(summary.lengths)} dimensions for the shape {form.shape}")


_MAX_TEXT_BYTES = 64 * 2**20
# Enough for a million folders with their times. Each value takes 70 bytes of memory.
_MAX_BRACKETS, _MAX_COMMAS = 2**20, 2**21


_HEADER_CHECKS: dict[str, _Check] = {
    "kind": lambda value: isinstance(value, str) and is_format(value),
    "schema": lambda value: isinstance(value, list),
    "fields": _is_object,
    "samples": _is_within(1, MAX_SAMPLES),
    "fingerprint": _is_match("[0-9a-f]{64}"),
    # It is below 0 if shards are more even than chance; its lower bound depends on the labels.
    "icc": _optional(lambda x: type(x) in (int, float) and -1e9 <= x <= 1 + 1e-9),
    "quarantined": _is_count,
    "shuffled": lambda value: isinstance(value, bool),
    "seed": _optional(_is_within(1 - 2**64, 2**64 - 1)),
    "source": _is_text(2**16),
    "arrangement": _is_match("([0-9a-f]{16})?"),
    "settings": _is_object,
    "directories": _is_list(_is_pair(_is_text(2 * _MAX_NAME), _is_within(1 - 2**63, 2**63 - 1))),
    "listing": _is_match("[0-9a-f]{0,64}"),
    "passed_over": _is_mapping(_is_count),
    "overhead_bytes": _optional(_is_count),
    "left_out": _is_mapping(_is_text()),
    "samples_left_out": _optional(_is_mapping(_is_pair(_is_count, _is_text(4 * _MAX_NAME)))),
}


@dataclass(frozen=True, kw_only=True)
class ManifestHeader:
    """The facts that hold for all shards: the JSON part of a manifest.

    kind: the format's name. schema: the fields, settled. fields: the summary of each. icc: see
    `label_correlation`. source: the URL of the data that a pack, or an index of tar files, was made
    from. arrangement: the key of the user's arrangement, "" for the default. settings: of a pack.
    directories: name and modification time in ns of each listed folder (local folders). listing:
    fingerprint of the listing that the index was built from, hex. passed_over: files that belong to
    no sample, by extension. overhead_bytes: the largest number of bytes of a pack's shard in
    addition to its samples. left_out: columns that are no field, with the reasons.
    samples_left_out: the number of left-out samples by reason, with an example.
    """

    kind: str
    schema: Schema
    fields: Mapping[str, FieldSummary]
    samples: int
    fingerprint: str
    icc: float | None
    quarantined: int
    shuffled: bool = False
    seed: int | None = None
    source: str = ""
    arrangement: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    directories: tuple[tuple[str, int], ...] = ()
    listing: str = ""
    passed_over: dict[str, int] = field(default_factory=dict)
    overhead_bytes: int | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    samples_left_out: dict[str, LeftOut] = field(default_factory=dict)

    @property
    def progressive(self) -> int | None:
        """Return the number of progressive JPEGs of all fields, None if they weren't counted."""
        counts = [each.progressive for each in self.fields.values()]
        counted = [count for count in counts if count is not None]
        return sum(counted) if counted else None

    @cached_property
    def layout(self) -> SampleLayout:
        """Return the storage of the samples' fields."""
        return SampleLayout(
            schema=self.schema,
            storage={name: each.storage for name, each in self.fields.items()},
            lacking=frozenset(name for name, each in self.fields.items() if each.missing),
        )

    @property
    def is_of_chunks(self) -> bool:
        """Return True if samples are stored in chunks, which metadata describes."""
        return any(each.storage == "chunks" for each in self.fields.values())

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object for a manifest."""
        values = {each.name: getattr(self, each.name) for each in dataclass_fields(self)}
        values["schema"] = self.schema.to_json()
        values["fields"] = {name: asdict(each) for name, each in self.fields.items()}
        optional = ("left_out", "samples_left_out")
        return {name: each for name, each in values.items() if each or name not in optional}


def load_header(text: bytes) -> dict[str, Any]:
    """Parse the JSON object of a manifest. Raises ValueError if it isn't one, or is too large."""
    brackets, commas = text.count(b"[") + text.count(b"{"), text.count(b",")
    if len(text) > _MAX_TEXT_BYTES or brackets > _MAX_BRACKETS or commas > _MAX_COMMAS:
        raise ValueError(f"its JSON part has {len(text):,} bytes and {commas:,} values")
    try:
        values = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("its JSON part is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("its JSON part isn't an object")
    return values


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} isn't a number")


def check_header(values: dict[str, Any]) -> ManifestHeader:
    """Parse the header from untrusted JSON. Raises ValueError, TypeError."""
    checked = _checked(values, _HEADER_CHECKS, "its")
    schema = Schema.from_json(values["schema"])
    values = checked | {"schema": schema}
    values.pop("penstock", None)
    fields = {name: check_summary(each) for name, each in values["fields"].items()}
    if fields.keys() != set(schema):
        raise ValueError("its summaries don't match the fields of its schema")
    values["fields"] = {name: fields[name] for name in schema}  # JSON sorts them
    if counts := values.pop("samples_left_out", None):
        from penstock.readers.origin import LeftOut, joined_left_out

        found = {reason: LeftOut(*each) for reason, each in counts.items()}
        values["samples_left_out"] = joined_left_out([found])
    about = ManifestHeader(**values)
    if unknown := schema.unsettled:
        raise ValueError(f"its schema doesn't define {unknown[0]!r} completely")
    for name, each in about.fields.items():
        check_fit(each, schema[name], samples=about.samples)
    return about


_NAMES_AT_ONCE = 2**14  # names that are checked at a time, a compromise of memory and speed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest:
    """The rows of an index, by shard.

    names: files of the shards or sidecars. etags: checksums of the sidecars, "" for packs. units:
    rows of each shard's decode units, little-endian uint32; empty if a sample can be read alone.
    field_bytes: bytes of each field of a shard of chunks, little-endian uint32, or uint64 if one
    needs it; None for other formats. shard_bytes, samples, files (that hold a shard's samples):
    int64. crc32c, columns_crc32c: see `Sums`, uint32. All are of shape (shards,).
    """

    about: ManifestHeader
    names: Sequence[bytes]
    etags: Sequence[str]
    shard_bytes: Ints
    samples: Ints
    files: Ints
    units: Sequence[bytes]
    crc32c: NDArray[np.uint32]
    columns_crc32c: NDArray[np.uint32]
    field_bytes: Sequence[bytes] | None = None

    @property
    def is_of_chunks(self) -> bool:
        """Return True if samples are stored in chunks, which metadata describes."""
        return self.field_bytes is not None

    @property
    def format(self) -> Format:
        """Return the dataset's format."""
        return format_named(self.about.kind)

    def sums(self, shard: int) -> Sums:
        """Return the checksums of one shard."""
        return Sums(int(self.crc32c[shard]), int(self.columns_crc32c[shard]))

    def units_of(self, shard: int) -> Ints:
        """Return the rows of each decode unit of a shard, int64, shape (units,); empty if a sample
        can be read alone."""
        return np.frombuffer(self.units[shard], "<u4").astype(np.int64)

    def bytes_of(self, fields: Iterable[str]) -> Ints:
        """Return the bytes of these fields in each shard of chunks: int64, shape (shards,)."""
        names, wanted = list(self.about.schema), set(fields)
        chosen = np.array([name in wanted for name in names], np.int64)
        rows = (_numbers(row, len(names)) @ chosen for row in self.field_bytes or ())
        return np.fromiter(rows, np.int64, len(self.names))

    def entry(self, shard: int, fields: tuple[str, ...] = ()) -> ShardEntry:
        """Return the facts about one shard. fields: see `ShardEntry`."""
        return ShardEntry(
            name=self.names[shard],
            size_bytes=int(self.shard_bytes[shard]),
            samples=int(self.samples[shard]),
            sums=self.sums(shard),
            layout=self.about.layout,
            overhead_bytes=self.about.overhead_bytes,
            fields=fields,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSummary:
    """The counts of a finished index or pack; its two subclasses describe them."""

    samples: int
    shards: int
    bytes: int
    quarantined: int
    seconds: float
    left_out: Mapping[str, int]

    @classmethod
    def of(cls, manifest: Manifest, **more: Any) -> Self:
        """Summarise a manifest. more: the attributes that it doesn't determine."""
        about = manifest.about
        return cls(
            samples=about.samples,
            shards=len(manifest.names),
            bytes=int(manifest.shard_bytes.sum()),
            quarantined=about.quarantined,
            left_out={reason: each.samples for reason, each in about.samples_left_out.items()},
            **more,
        )


def check_manifest(manifest: Manifest) -> None:
    """Raise ValueError if shards can't be as the manifest describes them."""
    about, samples, sizes = manifest.about, manifest.samples, manifest.shard_bytes
    if not len(samples):
        raise ValueError("it has no shards")
    _check_bounds("samples", samples, 1, MAX_SHARD_SAMPLES)
    format = manifest.format
    # A shard whose samples are all in tables has no file; chunks of fill values may be absent.
    has_files = manifest.files > 0 if not format.has_own_index else np.ones(len(samples), bool)
    _check_bounds("bytes", sizes[has_files], 1 - manifest.is_of_chunks, MAX_SHARD_BYTES)
    _check_bounds("files", manifest.files[has_files], 1, MAX_SHARD_SAMPLES)
    _check_bounds("bytes", sizes[~has_files], 0, 0)
    _check_bounds("files", manifest.files[~has_files], 0, 0)
    least = format.least_sample_bytes
    if least and (sizes[has_files] // least < samples[has_files]).any():
        raise ValueError("a shard has more samples than its bytes can hold")
    if float(sizes.sum(dtype=np.float64)) > MAX_BYTES:
        raise ValueError(f"its shards have more than {MAX_BYTES:,} bytes in all")
    total = int(samples.sum())  # no overflow: 2^24 a shard, and 2^30 bytes of shards
    if total != about.samples or total > MAX_SAMPLES:
        raise ValueError(
            f"its shards have {total:,} samples and it records {about.samples:,}, wanted the same "
            f"number, at most {MAX_SAMPLES:,}"
        )
    if manifest.is_of_chunks != about.is_of_chunks:
        raise ValueError("it has the bytes of fields without fields in chunks, or the reverse")
    seen: set[bytes] = set()
    for start in range(0, len(samples), _NAMES_AT_ONCE):
        some = slice(start, start + _NAMES_AT_ONCE)
        names = manifest.names[some]
        if are_unsafe(names):
            raise ValueError("a shard's name isn't a path below the dataset")
        if not format.has_own_index and not all(map(is_sidecar_name, names)):
            raise ValueError("a shard's name isn't a sidecar's")
        seen.update(names)
        for units, count in zip(manifest.units[some], samples[some].tolist(), strict=True):
            if units and not _adds_up(np.frombuffer(units, "<u4"), count, least=1):
                raise ValueError("a shard's decode units don't hold its samples")
        if manifest.field_bytes is None:
            continue
        for row, count in zip(manifest.field_bytes[some], sizes[some].tolist(), strict=True):
            if not _adds_up(_numbers(row, len(about.schema)), count, least=0):
                raise ValueError("the bytes of a shard's fields don't add up to the shard's")
    if len(seen) != len(samples):
        raise ValueError("two shards have the same name")


def _check_bounds(what: str, column: Ints, least: int, most: int) -> None:
    wrong = column[(column < least) | (column > most)]
    if len(wrong):
        raise ValueError(f"a shard has {wrong[0]:,} {what}, wanted {least:,} to {most:,}")


def _adds_up(numbers: Numbers, total: int, *, least: int) -> bool:
    return int(numbers.min()) >= least and sum(numbers.tolist()) == total


def _numbers(row: bytes, fields: int) -> Ints:
    """Parse the bytes of each field of one shard. Raises ValueError."""
    if len(row) not in (4 * fields, 8 * fields):
        raise ValueError("it doesn't contain the bytes of each field")
    return np.frombuffer(row, "<u8" if len(row) == 8 * fields else "<u4").astype(np.int64)


def join_manifest(
    names: Sequence[bytes],
    shards: Sequence[ShardSummary],
    *,
    kind: str,
    schema: Schema,
    quarantined: int,
    etags: Sequence[str] | None = None,
    **more: Any,
) -> Manifest:
    """Build the manifest of at least one shard, in their order. schema: settled. more: further
    fields of the header. Raises DatasetError for more than a manifest may contain."""
    labels = [s.labels for s in shards if s.labels is not None]
    overheads = [s.overhead_bytes for s in shards if s.overhead_bytes is not None]
    samples = np.array([s.samples for s in shards], np.int64)
    crcs, columns_crcs = np.array([astuple(s.sums) for s in shards], np.uint32).T
    about = ManifestHeader(
        kind=kind,
        schema=schema,
        fields={name: FieldSummary.joined([s.fields[name] for s in shards]) for name in schema},
        samples=int(samples.sum()),
        fingerprint=fingerprint(schema, samples, crcs, columns_crcs),
        icc=label_correlation(labels) if labels else None,
        quarantined=quarantined,
        overhead_bytes=max(overheads) if len(overheads) == len(shards) else None,
        **more,
    )
    is_of_chunks = any(each.field_bytes for each in shards)
    manifest = Manifest(
        about=about,
        names=names,
        etags=etags if etags is not None else [""] * len(names),
        shard_bytes=np.array([s.size_bytes for s in shards], np.int64),
        samples=samples,
        files=np.array([s.files for s in shards], np.int64),
        units=[np.array(s.units, "<u4").tobytes() for s in shards],
        crc32c=crcs,
        columns_crc32c=columns_crcs,
        field_bytes=[_packed(each.field_bytes) for each in shards] if is_of_chunks else None,
    )
    try:
        check_manifest(manifest)
    except ValueError as error:
        raise DatasetError(
            f"{about.source or 'The dataset'}: {error}. Use smaller shards or tar files, or "
            "split it into several datasets."
        ) from error
    return manifest


def _packed(numbers: Sequence[int]) -> bytes:
    return np.array(numbers, "<u8" if max(numbers) >= 2**32 else "<u4").tobytes()


def label_correlation(shards: Sequence[Mapping[int, int]]) -> float:
    """Measure how similar the labels of one shard are: 0 for a random mixture, 1 for one label per
    shard.

    The result is (P_within - P_total) / (1 - P_total). P is the probability that two distinct
    random samples share their label, if both are drawn from one shard (pairs of all shards weigh
    the same) or from the whole set. P is Simpson's index in its unbiased form (E. H. Simpson,
    Measurement of Diversity, Nature 163, 1949); for indicator variables of the labels, summed over
    labels, the ratio is the intraclass correlation of cluster sampling. It is slightly below 0 if
    shards are more even than chance, and 0 if it is undefined: there is one label, or no shard of
    two samples.
    """
    total: Counter[int] = Counter()
    same = pairs = 0
    for counts in shards:
        total.update(counts)
        n = sum(counts.values())
        pairs += n * (n - 1)
        same += sum(c * (c - 1) for c in counts.values())
    n = total.total()
    same_total = sum(c * (c - 1) for c in total.values())
    if pairs == 0 or same_total == n * (n - 1):
        return 0.0
    p_within, p_total = same / pairs, same_total / (n * (n - 1))
    return (p_within - p_total) / (1 - p_total)


def fingerprint(
    schema: Schema, samples: Ints, crcs: NDArray[np.uint32], columns_crcs: NDArray[np.uint32]
) -> str:
    """Return the fingerprint of the content, 64 hex digits: a hash of the schema, the shards' sizes
    and their checksums. It doesn't depend on the place or the time of writing, so a folder and its
    unshuffled pack of equal shards share it."""
    digest = hashlib.sha256(json.dumps(schema.to_json(), sort_keys=True).encode("ascii"))
    for column, kind in ((samples, "<i8"), (crcs, "<u4"), (columns_crcs, "<u4")):
        digest.update(np.ascontiguousarray(column, kind).tobytes())
    return digest.hexdigest()


MANIFEST = b"manifest.arrow"
"""The name of the manifest in the index's folder."""

_ROOT, _SUM = b"penstock", b"penstock.crc32c"
COLUMNS = {
    "uri": "binary",
    "etag": "string",
    "bytes": "int64",
    "samples": "int64",
    "files": "int64",
    "units": "binary",
    "crc32c": "uint32",
    "columns_crc32c": "uint32",
    "field_bytes": "binary",
}
"""The Arrow type of each column, in order. Only data in chunks has the last one."""
_OPTIONAL = frozenset(("field_bytes",))
_ATTRIBUTES = {"uri": "names", "etag": "etags", "bytes": "shard_bytes"}  # others have equal names

# A manifest has 112 bytes per shard and the names of the listed folders.
_MAX_BYTES, _MAX_READ_BYTES = 2**30, 2**27
_PACKS, _MAX_SOURCE = ("pack", "arrow"), 1000  # the names of their format in manifests of packs


def write_manifest(path: bytes, manifest: Manifest) -> None:
    """Write a manifest atomically. Raises WriteError."""
    from penstock.readers.files import write_whole  # readers of datasets need none of it

    columns = {}
    for name, type in COLUMNS.items():
        column = getattr(manifest, _ATTRIBUTES.get(name, name))
        if column is not None:
            values = column if isinstance(column, np.ndarray) else list(column)
            columns[name] = pa.array(values, type)
    about = {"version": VERSION, "penstock": __version__, **manifest.about.to_json()}
    text = json.dumps(about, sort_keys=True).encode("ascii")
    batch = pa.record_batch(columns)
    metadata = {_ROOT: text, _SUM: f"{_checksum(text, batch):08x}".encode()}
    write_whole(path, lambda temp: write_batch(temp, batch.replace_schema_metadata(metadata)))


def read_manifest(
    path: bytes, *, remedy: str, mapped: bool = True, url: str | None = None
) -> Manifest:
    """Read a manifest. remedy: the advice in an error's message. url: the remote object that this
    file is a copy of, or None. mapped: False reads the file into memory, unless it is large. This
    is for a cache's file: pyarrow ends the process if the offsets in mapped memory change, so a bit
    flip on disk must not reach it.

    Raises CorruptShardError if the file is incomplete, damaged or contains impossible values,
    OtherVersionError, FileNotFoundError.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it isn't a regular file")
        if status.st_size > _MAX_BYTES:
            raise ValueError(f"it has {status.st_size:,} bytes, wanted at most {_MAX_BYTES:,}")
        is_mapped = mapped or status.st_size > _MAX_READ_BYTES
        buffer = map_buffer(path) if is_mapped else read_buffer(path)
        noted = metadata(buffer)
        text = noted[_ROOT]
        values = load_header(text)
        form = values.pop("version")
        if type(form) is not int:
            raise ValueError("its version isn't a number")
        if form != VERSION:
            raise _other_version(url or printable(path), form, values, remedy)
        batch = only_batch(buffer, COLUMNS, optional=_OPTIONAL)
        if int(noted[_SUM], 16) != _checksum(text, batch):
            raise ValueError("its checksum is wrong")
        columns: dict[str, Any] = {
            _ATTRIBUTES.get(name, name): LazyColumn(each)
            if _is_text_column(name)
            else each.to_numpy()
            for name, each in zip(batch.schema.names, batch.columns, strict=True)
        }
        manifest = Manifest(about=check_header(values), **columns)
        check_manifest(manifest)
        return manifest
    except (FileNotFoundError, OtherVersionError):
        raise
    except MissingDependencyError as error:  # a format, or a field of a type, that isn't installed
        raise MissingDependencyError(f"{url or printable(path)}: {error}") from error
    except BROKEN as error:
        raise _damaged(path, url, error, remedy) from error


def read_manifest_of(origin: Origin, entry: Entry, *, remedy: str) -> Manifest:
    """Read a manifest of a local or a remote dataset."""
    url = None if origin.is_local else f"{origin.url.rstrip('/')}/{printable(entry.name)}"
    read = partial(read_manifest, remedy=remedy, mapped=origin.is_local, url=url)
    return origin.load(entry.name, read, size_bytes=entry.size_bytes, version=entry.version)


def _other_version(
    shown: str, form: int, values: Mapping[str, Any], remedy: str
) -> OtherVersionError:
    by, source = str(values.get("penstock"))[:40], values.get("source")
    if values.get("kind") in _PACKS and isinstance(source, str) and 0 < len(source) <= _MAX_SOURCE:
        again = shlex.quote(printable(os.fsencode(source)))
        remedy = f"Pack its source again: penstock pack {again} DST"
    is_newer = form > VERSION
    return OtherVersionError(
        f"{shown}: written by {'a newer' if is_newer else 'an earlier'} Penstock ({by!r}, format "
        f"{form}); this version reads format {VERSION} only. "
        f"{'Upgrade penstock, or: ' if is_newer else ''}{remedy}"
    )


def _damaged(
    path: bytes, url: str | None, error: Exception, remedy: str
) -> CorruptShardError | ReadError:
    if url is not None and _is_web_page(path):
        return CorruptShardError(
            f"{url}: the server sent a web page, wanted a manifest. Servers send one if a login is "
            "needed, and some send one for any path. Open the URL in a browser, and check the URL "
            "and the login in storage_options."
        )
    what, remedy = "not a valid manifest", f"It is incomplete or was changed. {remedy}"
    shown = printable(path)
    return damaged_file_error(url or shown, what, error, remedy=remedy, path=shown)


def _is_web_page(path: bytes) -> bool:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(1000).lstrip().lower().startswith((b"<!doctype html", b"<html"))
    return False


def _is_text_column(name: str) -> bool:
    return COLUMNS[name] in ("binary", "string")


def _checksum(text: bytes, batch: Any) -> int:
    total = crc32c(text)
    for name in sorted(batch.schema.names, key=_is_text_column):  # numbers first
        column = batch.column(name)
        if not _is_text_column(name):
            total = crc32c(np.ascontiguousarray(column.to_numpy()), total)
            continue
        for start in range(0, len(column), _NAMES_AT_ONCE):  # all values joined by NUL
            some = column[start : start + _NAMES_AT_ONCE].to_pylist()
            some = [each.encode() if isinstance(each, str) else each for each in some]
            total = crc32c((b"\0" if start else b"") + b"\0".join(some), total)
    return int(total)
