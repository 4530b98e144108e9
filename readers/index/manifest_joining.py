"""Join the summaries of shards to the manifest of a new index, and name and remove its sidecars."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import DatasetError
from penstock.readers.formats import FieldSummary, join_ranges
from penstock.readers.index.manifest import SIDECARS, Manifest, ManifestHeader, check_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields import Schema
    from penstock.readers.formats import ShardSummary

    Ints = NDArray[np.int64]

_FILE = re.compile(rb"[0-9a-f]{16}-\d{6,}(-[0-9a-f]{32})?\.arrow")
_GENERATION_DIGITS = 16


def sidecar_name(fingerprint: str, number: int, suffix: bytes) -> bytes:
    """Return the name of a sidecar, relative to the index's folder. Each generation has its own
    names, so that a process with the old manifest open never reads new sidecars as old ones.

    fingerprint: of the listing that is indexed. suffix: see `Sidecar`.
    """
    generation = fingerprint[:_GENERATION_DIGITS].encode()
    return b"%s/%s-%06d%s.arrow" % (SIDECARS, generation, number, suffix)


def sweep_sidecars(folder: bytes, *, keep: set[bytes]) -> None:
    """Remove the sidecars of earlier generations and the leftovers of a killed build. folder: the
    index's."""
    sidecars = os.path.join(folder, SIDECARS)
    for name in os.listdir(sidecars):
        ours = _FILE.fullmatch(name.removeprefix(b".").removesuffix(b".tmp"))
        if ours and SIDECARS + b"/" + name not in keep:
            os.unlink(os.path.join(sidecars, name))


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
    *, schema: Schema, samples: Ints, crcs: NDArray[np.uint32], columns_crcs: NDArray[np.uint32]
) -> str:
    """Return the fingerprint of the content, 64 hex digits: a hash of the schema, the shards' sizes
    and their checksums. It doesn't depend on the place or the time of writing, so a folder and its
    unshuffled pack of equal shards share it."""
    digest = hashlib.sha256(json.dumps(schema.to_json(), sort_keys=True).encode("ascii"))
    for column, kind in ((samples, "<i8"), (crcs, "<u4"), (columns_crcs, "<u4")):
        digest.update(np.ascontiguousarray(column, kind).tobytes())
    return digest.hexdigest()


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
    crcs = np.array([s.sums.samples for s in shards], np.uint32)
    columns_crcs = np.array([s.sums.columns for s in shards], np.uint32)
    about = ManifestHeader(
        kind=kind,
        schema=schema,
        fields={name: join_summaries([s.fields[name] for s in shards]) for name in schema},
        samples=int(samples.sum()),
        fingerprint=fingerprint(
            schema=schema, samples=samples, crcs=crcs, columns_crcs=columns_crcs
        ),
        icc=label_correlation(labels) if labels else None,
        quarantined=quarantined,
        overhead_bytes=max(overheads) if len(overheads) == len(shards) else None,
        **more,
    )
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
        field_bytes=_field_bytes(shards),
    )
    try:
        check_manifest(manifest)
    except ValueError as error:
        raise DatasetError(
            f"{about.source or 'The dataset'}: {error}. Use smaller shards or tar files, or "
            "split it into several datasets."
        ) from error
    return manifest


def _field_bytes(shards: Sequence[ShardSummary]) -> list[bytes] | None:
    if not any(each.field_bytes for each in shards):
        return None
    return [
        np.array(each.field_bytes, "<u8" if max(each.field_bytes) >= 2**32 else "<u4").tobytes()
        for each in shards
    ]


def join_summaries(parts: Sequence[FieldSummary]) -> FieldSummary:
    """Combine the summaries of one field over several shards, at least one. Raises ValueError if
    they store it in different ways."""
    first = parts[0]
    if any(part.storage != first.storage for part in parts):
        raise ValueError("shards store one field in different ways")
    ranges = [part.images for part in parts if part.images is not None]
    lengths = [part.lengths for part in parts if part.lengths]
    bounds = [part.bounds for part in parts if part.bounds is not None]
    counted = [part.progressive for part in parts if part.progressive is not None]
    return FieldSummary(
        storage=first.storage,
        missing=sum(part.missing for part in parts),
        images=join_ranges(ranges) if ranges else None,
        channels=tuple(sorted({c for part in parts for c in part.channels})),
        codecs=tuple(sorted({c for part in parts for c in part.codecs})),
        lengths=tuple(
            (min(low for low, _ in axis), max(high for _, high in axis))
            for axis in zip(*lengths, strict=True)
        ),
        bounds=(
            (min(low for low, _ in bounds), max(high for _, high in bounds))
            if len(bounds) == len(parts)
            else None
        ),
        progressive=sum(counted) if len(counted) == len(parts) else None,
    )
