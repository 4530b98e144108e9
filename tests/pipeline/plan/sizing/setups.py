"""Setups for the tests of sizing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.pipeline.plan.sizing import ClusterSetup

SETUP = ClusterSetup(
    samples=1_281_167,
    sample_bytes=114_660,
    nodes=4,
    gpus=8,
    global_batch=8192,
    samples_per_s=1786,
    epochs=90,
    cores=128,
    ram_bytes=1e12,
    nvme_bytes=1.5e12,
    nvme_bytes_per_s=5e9,
    nic_bytes_per_s=12.5e9,
    store_bytes_per_s=10e9,
    store_latency_s=0.03,
    stream_bytes_per_s=1e8,
    store_requests_per_s=1e6,
)


def setup(**changed: Any) -> ClusterSetup:
    """The usual setup with some figures changed."""
    return replace(SETUP, **changed)
