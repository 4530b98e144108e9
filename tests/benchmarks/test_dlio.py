"""Test the DLIO-style workloads: their data, their pace, and one tiny run of two of them."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from benchmarks import dlio, dlio_jobs
from benchmarks.dlio_child import LoaderName, raw_read, run
from benchmarks.dlio_data import Kind, files_below, filled, forget, jpeg_of, make
from benchmarks.dlio_task import Task, Work
from benchmarks.dlio_torch import GroupOrder, RowGroups
from penstock.cache import ConfigError
from penstock.pipeline.bench import SETTLE_BATCHES
from tests.properties import examples

if TYPE_CHECKING:
    from pathlib import Path

RESNET = dlio_jobs.WORKLOADS[0]
rates = st.floats(1e6, 1e11)


# --- the pace ------------------------------------------------------------------------------------


@given(
    raw=rates,
    decode=st.sampled_from([0.0, 50.0, 1e4, 1e6]),
    workload=st.sampled_from(dlio_jobs.WORKLOADS),
)
def test_a_job_asks_for_its_share_at_most_and_is_never_faster_than_published(
    raw: float, decode: float, workload: dlio_jobs.DlioWorkload
) -> None:
    pace = dlio_jobs.pace_of(workload, raw_bytes_per_s=raw, decode_samples_per_s=decode)
    assert pace.k >= 1
    assert pace.step_s == pytest.approx(pace.k * workload.step_s)
    assert pace.required_bytes_per_s <= dlio_jobs.DISK_SHARE * raw * (1 + 1e-9)
    assert pace.required_bytes_per_s == pytest.approx(workload.bytes_per_s / pace.k)
    if decode:
        assert workload.batch / pace.step_s <= dlio_jobs.DECODE_SHARE * decode * (1 + 1e-9)


@given(raw=rates)
def test_a_job_is_slowed_down_by_no_more_than_needed(raw: float) -> None:
    pace = dlio_jobs.pace_of(RESNET, raw_bytes_per_s=raw, decode_samples_per_s=0.0)
    needed = max(1.0, RESNET.bytes_per_s / (dlio_jobs.DISK_SHARE * raw))
    assert pace.k <= 1.1 * needed + 1e-9
    assert float(f"{pace.k:.1e}") == pytest.approx(pace.k)  # two digits, for the report


def test_a_disk_that_gives_nothing_has_no_pace() -> None:
    with pytest.raises(ConfigError, match="more than 0"):
        dlio_jobs.pace_of(RESNET, raw_bytes_per_s=0.0, decode_samples_per_s=0.0)


@given(samples=st.integers(1, 10**6), step_s=st.floats(1e-3, 10), most_s=st.floats(0.1, 60))
def test_no_sample_comes_twice_in_a_run(samples: int, step_s: float, most_s: float) -> None:
    steps = samples // RESNET.batch
    try:
        seconds = dlio_jobs.measured_seconds(RESNET, step_s, samples=samples, most_s=most_s)
    except ConfigError:
        assert steps < SETTLE_BATCHES + 4
    else:
        assert seconds <= most_s
        assert seconds / step_s + SETTLE_BATCHES < steps


def test_every_workload_makes_enough_samples() -> None:
    for workload in dlio_jobs.WORKLOADS:
        step_s = workload.step_s
        assert dlio_jobs.measured_seconds(workload, step_s, samples=workload.samples, most_s=60) > 0


# --- the data ------------------------------------------------------------------------------------


@examples(50)
@given(missing=st.integers(0, 300_000), number=st.integers(0, 10**6))
def test_a_filled_jpeg_has_exactly_its_bytes_and_the_same_pixels(missing: int, number: int) -> None:
    size = len(PICTURE) + missing
    report = filled(PICTURE, size, number=number)
    assert len(report) == (size if missing >= 4 else len(PICTURE))
    with Image.open(io.BytesIO(report)) as image, Image.open(io.BytesIO(PICTURE)) as plain:
        assert np.array_equal(np.asarray(image), np.asarray(plain))


def _picture() -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (24, 16), (200, 30, 90)).save(written, "JPEG")
    return written.getvalue()


PICTURE = _picture()


def test_jpegs_come_near_their_bytes_from_below() -> None:
    for number in range(3):
        size = len(jpeg_of(60_000, number=number, seed=7))
        assert 0.6 * 60_000 < size <= 60_000


def test_too_small_a_jpeg_is_refused() -> None:
    with pytest.raises(ConfigError, match="larger samples"):
        jpeg_of(300, number=0, seed=7)


def test_arrays_have_exactly_their_bytes_and_are_made_once(tmp_path: Path) -> None:
    def made() -> list[tuple[int, int]]:
        done = make(tmp_path / "data", kind="npy", samples=3, sample_bytes=5000)
        return [(p.stat().st_size, p.stat().st_mtime_ns) for p in files_below(done.files)]

    first = made()
    assert [size for size, _ in first] == [5000] * 3
    assert made() == first


@pytest.mark.parametrize(("kind", "bytes_each"), [("npz", 5000), ("parquet", 40_000)])
def test_others_come_near_their_bytes(kind: Kind, bytes_each: int, tmp_path: Path) -> None:
    done = make(tmp_path / "data", kind=kind, samples=20, sample_bytes=bytes_each)
    total = sum(path.stat().st_size for path in files_below(done.files))
    assert total == pytest.approx(20 * bytes_each, rel=0.05)


def test_the_raw_reader_reads_every_byte(tmp_path: Path) -> None:
    done = make(tmp_path / "data", kind="npy", samples=5, sample_bytes=5000)
    forget(done.files)
    total, took_s = raw_read(done.files, request_bytes=1000, seconds=60)
    assert total == 5 * 5000
    assert took_s > 0


# --- one tiny run --------------------------------------------------------------------------------


@pytest.mark.timed
def test_a_tiny_run_is_written(tmp_path: Path) -> None:
    path = dlio.measure(
        ["resnet50"],
        tmp_path / "data",
        rounds=1,
        seconds=0.2,
        quick=True,
        results=tmp_path,
        console=Console(file=io.StringIO(), width=200),
    )
    report = json.loads(path.read_text())
    assert {"date", "machine", "versions", "disk_share"} <= report.keys()
    found = report["workloads"]["resnet50"]
    assert set(found["summary"]) == {"penstock", "torch", "floor"}
    assert all(0 < summary["au"]["median"] <= 100 for summary in found["summary"].values())
    assert found["raw_bytes_per_s"] > 0
    assert found["note"]
    assert isinstance(found["load_average_5_min"], float)
    # "image" isn't among the fields, and the images' bytes are read all the same.
    (run,) = found["runs"]["penstock"]
    assert run["read_bytes"] >= run["samples"] * found["data"]["sample_bytes"]
    assert str(tmp_path) not in path.read_text()


@pytest.mark.parametrize("name", ["penstock", "torch", "floor"])
@pytest.mark.parametrize(
    ("kind", "work"), [("npy", "arrays"), ("npz", "arrays"), ("parquet", "columns")]
)
def test_every_loader_reads_arrays(
    name: LoaderName, kind: Kind, work: Work, tmp_path: Path
) -> None:
    done = make(tmp_path / "data", kind=kind, samples=32, sample_bytes=50_000)
    task = Task(
        work=work,
        files=str(done.files),
        pack=str(done.pack),
        sample_bytes=50_000,
        batch_size=2,
        workers=0,
        kind=kind,
    )
    report = run(name, task, step_s=0.001, seconds=0.02)
    assert report["samples"] == 2 * report["batches"]


def test_torchs_row_groups_are_each_read_once(tmp_path: Path) -> None:
    done = make(tmp_path / "data", kind="parquet", samples=40, sample_bytes=5_000)
    data = RowGroups(str(done.files))
    order = [*GroupOrder(data, 3)]
    assert sorted(order) == list(range(40))
    assert [data[index][-1] for index in order] == order
