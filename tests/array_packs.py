"""Write a pack of arrays whose first and last bytes identify the sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock import pack

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES, SAMPLE_BYTES = 720, 10_000


def write_array_pack(root: Path) -> Path:
    """Write the pack below a folder, in shards of 256 KiB, and return its path."""
    samples = np.random.default_rng(1).integers(0, 256, (SAMPLES, SAMPLE_BYTES), dtype=np.uint8)
    samples[:, 0], samples[:, -1] = np.arange(SAMPLES) % 251, np.arange(SAMPLES) % 241
    np.save(root / "data.npy", samples)
    pack(str(root / "data.npy"), str(root / "pack"), shard_bytes=2**18, shuffle=False)
    return root / "pack"


def array_pack_bytes(folder: Path) -> int:
    """Return the total bytes of its shards."""
    return sum(path.stat().st_size for path in folder.glob("*.arrow"))
