"""Setups for the tests of sizing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.pipeline.plan.sizing import (
    ClusterSetup,
    DataFigures,
    JobFigures,
    NodeFigures,
    StoreFigures,
)

SETUP = ClusterSetup(
    data=DataFigures(samples=1_281_167, sample_bytes=114_660),
    node=NodeFigures(
        cores=128, ram_bytes=1e12, nvme_bytes=1.5e12, nvme_bytes_per_s=5e9, nic_bytes_per_s=12.5e9
    ),
    store=StoreFigures(
        bytes_per_s=10e9, latency_s=0.03, stream_bytes_per_s=1e8, requests_per_s=1e6
    ),
    job=JobFigures(nodes=4, gpus=8, global_batch=8192, samples_per_s=1786, epochs=90),
)


def setup(
    *,
    data: dict[str, Any] | None = None,
    node: dict[str, Any] | None = None,
    store: dict[str, Any] | None = None,
    job: dict[str, Any] | None = None,
) -> ClusterSetup:
    """The usual setup with some figures changed."""
    assert SETUP.store is not None
    return replace(
        SETUP,
        data=replace(SETUP.data, **data or {}),
        node=replace(SETUP.node, **node or {}),
        store=replace(SETUP.store, **store or {}),
        job=replace(SETUP.job, **job or {}),
    )
