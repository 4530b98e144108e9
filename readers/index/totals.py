"""What is summed up over all shards: label correlation, the fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.schema import Schema


def label_correlation(shards: Sequence[Mapping[int, int]]) -> float:
    """How much alike the labels of one shard are: 0 as in the whole set, 1 one label a shard.

    (P_within - P_total) / (1 - P_total), P the probability that two distinct random samples share
    their label, drawn from one shard (pairs of all shards weigh the same) or from the whole set.
    P is Simpson's index in its unbiased form (E. H. Simpson, Measurement of Diversity, Nature 163,
    1949); for indicator variables of the labels, summed over labels, the ratio is the intraclass
    correlation of cluster sampling. Slightly below 0 where shards are more even than chance. 0
    where nothing can be told apart: one label, or no shard of two samples.
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
    *,
    schema: Schema,
    samples: NDArray[np.int64],
    crcs: NDArray[np.uint32],
    columns_crcs: NDArray[np.uint32],
) -> str:
    """The fingerprint of the content: the schema, shards' sizes, their checksums. Not of where it
    lies or when it was written, so a folder and its unshuffled pack of equal shards share it. Hex,
    64 characters."""
    digest = hashlib.sha256(json.dumps(schema.to_json(), sort_keys=True).encode("ascii"))
    for column, kind in ((samples, "<i8"), (crcs, "<u4"), (columns_crcs, "<u4")):
        digest.update(np.ascontiguousarray(column, kind).tobytes())
    return digest.hexdigest()
