"""Bound the counts and sizes that an index may state, and number the version of its files."""

from __future__ import annotations

VERSION = 2
"""Of manifest, sidecar and shard. A reader refuses any other."""

MAX_SHARD_SAMPLES = 2**24
"""Samples of one shard: 16.8 million, of which the order of a window takes 0.4 GB."""

MAX_SAMPLES = 2**36
"""Samples of one dataset: 69 billion."""

MAX_SHARD_BYTES, MAX_BYTES = 2**50, 2**60
"""Bytes of one shard and of one dataset."""

MAX_SIDE = 2**27
"""Pixels of an image's longer side; it is that of the largest image that is ever decoded."""
