"""Test the counts of a mixture's parts: in statistics, metrics and the verdict."""

from __future__ import annotations

import time
import urllib.request
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock import DataLoader, Dataset, Map, Value, World, mix
from penstock.errors import BadSampleError
from penstock.pipeline.report import (
    LoaderFacts,
    PartFacts,
    PartMeter,
    diagnose,
    log_tensorboard,
    serve_metrics,
)
from penstock.readers import fixed_tokens
from penstock.readers.fieldtypes import Array, PartLoads, Schema, Tokens

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {"web": 300, "code": 90, "math": 30}
WEIGHTS = {"web": 0.5, "code": 0.3, "math": 0.2}
ROW = 64 * 8  # bytes of a sample


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    folder: Path = tmp_path_factory.mktemp("parts")
    for number, (name, size) in enumerate(SIZES.items()):
        values = 1000 * number + np.arange(size)
        np.save(folder / f"{name}.npy", np.repeat(values[:, None], 64, axis=1))
    return {name: Dataset(folder / f"{name}.npy") for name in SIZES}


def loader(parts: dict[str, Dataset], arguments: Any = None, **others: Any) -> DataLoader:
    mixture = mix(parts, **{"weights": WEIGHTS, "epoch": 200, **(arguments or {})})
    return DataLoader(mixture, shuffle=True, seed=5, global_batch_size=20, **others)


@pytest.mark.parametrize("has_part", [False, True])
def test_samples_and_bytes_are_those_that_were_delivered(parts, has_part):
    names = (*parts["web"].fields, *(("part",) if has_part else ()))
    with loader(parts, {"fields": names}) as job:
        numbers = np.concatenate([batch[0][:, 0].numpy() for _ in range(2) for batch in job])
        found = job.statistics()
    assert list(found.parts) == list(SIZES)
    for number, (name, part) in enumerate(found.parts.items()):
        own = int((numbers // 1000 == number).sum())
        assert part.samples == own
        assert part.epochs == own / SIZES[name]
        assert part.bytes == own * ROW
        assert part.load_s > 0
        assert part.tokens is None
        assert part.bad == 0
    assert sum(part.bytes for part in found.parts.values()) == found.bytes_disk
    assert sum(part.load_s for part in found.parts.values()) <= found.load_s
    assert '"math": ' in str(found)


def test_many_reads_are_summed_up_exactly(parts):
    mixture = mix(parts, weights=WEIGHTS).mixture
    meter = PartMeter(mixture, consumed=lambda: np.zeros(3, np.int64), tokens=[None] * 3)
    random, expected = np.random.default_rng(0), np.zeros((3, 3))
    for _ in range(300):
        loads = PartLoads.of(random.integers(0, 3, 3))
        loads.amounts[:, 1:] = random.integers(1, 9, (len(loads.parts), 2))
        for share in (0.25, 0.75):  # two batches of one read
            meter.count(loads._replace(share=share))
        expected[loads.parts] += loads.amounts
    found = meter.table().values()
    assert [part.bytes for part in found] == expected[:, 1].tolist()
    np.testing.assert_allclose([part.load_s for part in found], expected[:, 2])


def test_samples_are_those_of_all_ranks_and_bytes_those_of_one(parts):
    totals = {name: 0 for name in SIZES}
    for rank in range(4):
        with loader(parts, world=World(rank, 4), pad="mask") as job:
            for _ in job:
                pass
            found = job.statistics().parts
        assert sum(part.samples for part in found.values()) == 200
        for name, part in found.items():
            totals[name] += part.bytes
    assert totals == {name: part.samples * ROW for name, part in found.items()}


def test_counts_continue_after_a_change_of_weights_and_a_restart(parts):
    with loader(parts) as job:
        batches = iter(job)
        for _ in range(4):
            next(batches)
        before = job.statistics()
        job.set_weights({"web": 0.1, "code": 0.1, "math": 0.8})
        rest = [*batches]
        after, state = job.statistics(), job.state_dict()
    assert len(rest) == 6
    assert before.samples == 80
    assert after.samples == 200
    assert after.parts["math"].samples - before.parts["math"].samples == pytest.approx(96, abs=2)
    # Batches that were read at once with others and then discarded count by their samples.
    assert sum(part.bytes for part in after.parts.values()) == pytest.approx(200 * ROW, rel=0.01)
    with loader(parts) as again:
        again.load_state_dict(state)
        found = again.statistics()
    assert {n: p.samples for n, p in found.parts.items()} == {
        n: p.samples for n, p in after.parts.items()
    }
    assert not any(part.bytes for part in found.parts.values())


def test_bad_samples_are_counted_for_their_part(parts):
    def check(data: np.ndarray) -> np.int64:
        if data[0] >= 2000 and data[0] % 2:
            raise BadSampleError("odd")
        return np.int64(data[0])

    (name,) = parts["web"].fields
    recipe = [Map(check, fields=(name,), returns={name: Value("int64")})]
    with loader(parts, augment=recipe, max_bad=1.0) as job:
        with pytest.warns(match="bad"):
            list(job)
        found = job.statistics()
    bad = {part: each.bad for part, each in found.parts.items()}
    assert bad["web"] == bad["code"] == 0
    assert bad["math"] == found.bad > 0


def test_tokens_are_counted_if_all_samples_have_as_many():
    fixed = Schema({"tokens": Array("int64", (2048,)), "label": Array("int64", (3,))})
    assert fixed_tokens(fixed, ("label", "tokens")) == 2048
    assert fixed_tokens(fixed, ("label",)) is None
    assert fixed_tokens(Schema({"tokens": Tokens("int64")}), ("tokens",)) is None


def test_metrics_have_a_label_for_each_part(parts):
    pytest.importorskip("prometheus_client")
    written: dict[str, float] = {}
    writer = SimpleNamespace(
        add_scalar=lambda name, value, _: written.update({name: value}), add_text=lambda *_: None
    )
    with loader(parts) as job:
        for _ in job:
            pass
        found = job.statistics().parts
        with serve_metrics(job) as server:
            url = f"http://127.0.0.1:{server.port}/metrics"
            with urllib.request.urlopen(url, timeout=30) as answer:
                text = answer.read().decode()
        log_tensorboard(job, writer, 1)
    for name, part in found.items():
        (line,) = [
            line
            for line in text.splitlines()
            if line.startswith("penstock_part_samples_total") and f'part="{name}"' in line
        ]
        assert float(line.split()[-1]) == part.samples
        assert written[f"penstock/part_bytes/{name}"] == part.bytes
    assert text.count("# TYPE penstock_part_load_seconds_total counter") == 1


FACTS = LoaderFacts(
    samples=1000,
    batches=10,
    step_s=1.0,
    wait_s=4.0,
    wait_read_s=4.0,
    load_s=5.0,
    elapsed_s=5.0,
    decode_threads=2,
    usable_cores=2,
    device="cpu",
    url="mixture",
    bytes_read=10**9,
    disk_bytes=10**9,
)


@pytest.mark.parametrize(
    ("load", "samples", "is_named"),
    [(0.9, 0.2, True), (0.7, 0.7, False), (0.45, 0.1, False), (0.6, 0.3, True)],
)
def test_the_verdict_names_the_part_whose_data_is_slow(load, samples, is_named):
    part = PartFacts(name="code", load_share=load, sample_share=samples)
    found = diagnose(replace(FACTS, part=part))
    assert found.limit == "disk"
    assert ('the part "code"' in found.verdict) == is_named
    assert "part" not in diagnose(FACTS).verdict
    fed = replace(FACTS, part=part, wait_s=0.0, wait_read_s=0.0)
    assert "part" not in diagnose(fed).verdict


def test_a_slow_part_takes_most_of_the_reading_time(parts, monkeypatch):
    real = Dataset.read

    def slow(self: Dataset, rows: Any, **options: Any) -> Any:
        if self is parts["code"]:
            until = time.perf_counter() + 0.01
            while time.perf_counter() < until:
                pass
        return real(self, rows, **options)

    monkeypatch.setattr(Dataset, "read", slow)
    with loader(parts, {"fields": (*parts["web"].fields, "part")}) as job:
        for _ in job:
            pass
        part = job.statistics().facts.part
    assert part is not None
    assert part.name == "code"
    assert part.load_share > 0.5
    assert part.sample_share == pytest.approx(0.3, abs=0.05)


def test_other_datasets_have_no_parts(parts):
    with DataLoader(parts["web"], 20, shuffle=True, seed=1) as job:
        for _ in job:
            pass
        found = job.statistics()
    assert found.parts == {}
    assert found.facts.part is None
    assert "Parts" not in str(found)
