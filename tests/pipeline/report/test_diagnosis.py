"""The verdict names the right limit and cause of given facts, and its predictions follow."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.base import Traffic, growth
from penstock.pipeline.report import (
    Cause,
    Ceilings,
    ChunkFacts,
    CoreSpeeds,
    ImageFigures,
    Limit,
    LoaderFacts,
    MapFacts,
    ProgressiveCost,
    Rate,
    ShardFigures,
    TierFacts,
    diagnose,
)
from penstock.readers.formats import DecodedCounts
from tests.properties import examples


def rate(samples_per_s: float, cpu_s_per_1000: float = 1.0) -> Rate:
    return Rate(
        samples_per_s=samples_per_s, bytes_per_s=1e5 * samples_per_s, cpu_s_per_1000=cpu_s_per_1000
    )


def facts(**more: Any) -> LoaderFacts:
    """A run of 1,000 samples in 10 s that waited for decoding."""
    usual: dict[str, Any] = {
        "samples": 1000,
        "batches": 10,
        "step_s": 1.0,
        "wait_s": 9.0,
        "wait_read_s": 0.1,
        "wait_decode_s": 8.9,
        "read_s": 0.5,
        "load_s": 1.0,
        "elapsed_s": 11.0,
        "decode_threads": 2,
        "usable_cores": 2,
        "device": "cpu",
        "url": "/data/set",
    }
    return LoaderFacts(**{**usual, **more})


def images(**more: Any) -> ImageFigures:
    usual: dict[str, Any] = {
        "seen": 200,
        "mean_bytes": 1e5,
        "mean_pixels": 90_000.0,
        "progressive": 0.0,
        "out_short": 224,
        "pack_short": 256,
        "mean_short_pixels": 85_000.0,
    }
    return ImageFigures(**{**usual, **more})


def remote(**more: Any) -> TierFacts:
    traffic: dict[str, Any] = {
        "bytes_remote": 10**9,
        "bytes_filled": 10**9,
        "requests": 100,
        "remote_wait_s": 0.9,
    }
    tiers: dict[str, Any] = {"wanted_bytes": 10**9, "kept_bytes": 10**9, "max_bytes": 2 * 10**9}
    for name, value in more.items():
        (tiers if name in tiers else traffic)[name] = value
    return TierFacts(traffic=Traffic(**traffic), connections=64, request_p99_s=0.8, **tiers)


def mapped(**more: Any) -> MapFacts:
    usual = {"name": "Map(tokens)", "seconds": 0.9, "processes": 0, "batched": False}
    return MapFacts(**{**usual, **more})


def chunks(*, again: int = 40, file_bytes: int = 0) -> ChunkFacts:
    """Windows of 64 chunks of 180 MB, decoded 3.1 times."""
    counts = DecodedCounts(
        decoded_bytes=31 * 10**9,
        delivered_bytes=10**10,
        chunks=172,
        again=again,
        max_bytes=4 * 2**30,
        most_disk_bytes=file_bytes,
    )
    return ChunkFacts(counts=counts, open_chunks=64, window=16, file_bytes=file_bytes)


READING = {"wait_read_s": 8.9, "wait_decode_s": 0.1}
LARGE = images(mean_pixels=12e6)
PROGRESSIVE = images(progressive=1.0)
TINY = ShardFigures(count=5000, mean_bytes=40_000, are_files=False)
USUAL = ShardFigures(count=5000, mean_bytes=60e6, are_files=False)
FEW = ShardFigures(count=3, mean_bytes=40_000, are_files=False)
FILES = ShardFigures(count=5000, mean_bytes=40_000, are_files=True)
SLOW_CORE = CoreSpeeds(numbers=(0, 1), speeds=(1.0, 0.3))
ALONE = Ceilings(
    read=rate(9000.0), decode=rate(140.0, 1.4), augment=rate(110.0, 2.0), python=rate(50_000.0)
)
TWICE = ProgressiveCost(times=2.0, images=16, of_twins=True)
MEASURED = replace(ALONE, progressive=TWICE)
HEAVY = replace(ALONE, decode=rate(400.0, 0.5))

COMPUTING = facts(**READING, read_s=0.9, shards=USUAL)
NO_IMAGES = facts(decodes=False, wait_read_s=0.0, wait_decode_s=0.1)

PLANTED: list[tuple[LoaderFacts, Limit, Cause, str]] = [
    (facts(batches=0), "nothing yet", "", "Too early"),
    (facts(step_s=10.0, wait_s=0.1), "model", "slow-model", "would change nothing"),
    (facts(step_s=10.0, wait_s=0.1, gil_late=0.9), "python", "gil", "process of its own"),
    (facts(step_s=8.0, wait_s=2.0, gil_late=0.9), "python", "gil", "holds Python's GIL"),
    (facts(gil_late=0.9), "decode", "slow-decode", "num_workers="),
    (facts(**READING, gil_late=0.9), "python", "gil", "GIL"),
    (facts(), "decode", "slow-decode", "num_workers="),
    (facts(usable_cores=8), "decode", "slow-decode", "num_workers=8"),
    (facts(device="cuda:0"), "decode", "slow-decode", "on the GPU"),
    (COMPUTING, "disk", "slow-read", "It isn't the disk"),
    (NO_IMAGES, "disk", "slow-read", "fewer fields"),
    (replace(NO_IMAGES, wait_read_s=8.9), "disk", "slow-disk", "bytes from the disk"),
    (facts(images=images()), "decode", "slow-decode", "num_workers="),
    (facts(images=LARGE), "decode", "oversized", "set DST --short-side 256"),
    (facts(images=LARGE), "decode", "oversized", "shorter than 224 pixels is enlarged"),
    (facts(images=images(mean_pixels=2e5)), "decode", "slow-decode", "--short-side 256"),
    (facts(images=PROGRESSIVE), "decode", "progressive", "set DST --baseline"),
    (facts(images=images(progressive=0.02)), "decode", "slow-decode", "num_workers="),
    (facts(images=replace(LARGE, progressive=1.0)), "decode", "oversized", "short-side"),
    (facts(cores=SLOW_CORE), "decode", "slow-core", "Core 1 is slow"),
    (facts(cores=SLOW_CORE, decode_threads=1), "decode", "slow-decode", "num_workers=2"),
    (facts(cores=CoreSpeeds(numbers=(0, 1), speeds=(0.9, 1.0))), "decode", "slow-decode", "num_w"),
    # A gain that is known goes before one that isn't.
    (facts(cores=SLOW_CORE, images=PROGRESSIVE), "decode", "slow-core", "Core 1"),
    (
        facts(
            cores=SLOW_CORE,
            images=PROGRESSIVE,
            ceilings=replace(ALONE, progressive=replace(TWICE, times=3.0)),
        ),
        "decode",
        "progressive",
        "baseline",
    ),
    (facts(images=PROGRESSIVE, ceilings=MEASURED), "decode", "progressive", "take 2 times as"),
    (
        facts(images=PROGRESSIVE, ceilings=replace(ALONE, progressive=replace(TWICE, times=1.1))),
        "decode",
        "slow-decode",
        "num_workers=",
    ),
    (
        facts(ceilings=ALONE),
        "decode",
        "slow-decode",
        "(91% of the 110/s that decoding and augmenting alone reached).",
    ),
    (facts(ceilings=HEAVY), "augment", "slow-augment", "only 25% of the work"),
    (facts(ceilings=HEAVY, cores=SLOW_CORE), "augment", "slow-core", "Core 1"),
    (
        facts(device="cuda:0", ceilings=replace(ALONE, copy=rate(105.0))),
        "copy",
        "slow-copy",
        "fewer bytes",
    ),
    (facts(workers=2, **READING, usable_cores=8), "dataset", "dataset-code", "num_workers=8"),
    (facts(workers=8, **READING), "dataset", "dataset-code", "8 already share 2 cores"),
    (facts(workers=2), "decode", "slow-decode", "num_workers="),
    (facts(**READING, map=mapped()), "map", "slow-map", "processes=2 would call it"),
    (facts(**READING, map=mapped(), gil_late=0.9), "map", "slow-map", "90% of the time"),
    (
        facts(**READING, map=mapped(processes=2), usable_cores=8),
        "map",
        "slow-map",
        "Predicted, if the function computes, and the cores are free",
    ),
    (facts(**READING, map=mapped(processes=2)), "map", "slow-map", "Do it once, batched=True"),
    (facts(**READING, map=mapped(seconds=0.4)), "disk", "slow-disk", "NVMe"),
    (facts(map=mapped()), "decode", "slow-decode", "num_workers="),
    (facts(**READING), "disk", "slow-disk", "`penstock pack /data/set DST`) on a local NVMe"),
    (facts(**READING, shards=FILES), "disk", "slow-disk", "penstock pack /data/set"),
    (facts(**READING, shards=USUAL), "disk", "slow-disk", "NVMe"),
    (facts(**READING, shards=TINY), "disk", "tiny-shards", "--shard-bytes 64MiB"),
    (facts(**READING, shards=FEW), "disk", "slow-disk", "NVMe"),
    (
        facts(**READING, chunks=chunks()),
        "disk",
        "decoded-again",
        "3.1 x the delivered bytes were decoded: this rank's windows have 64 chunks of 171.9 MiB, "
        'and 4.0 GiB of memory keep them. Dataset(decoded_bytes="11001MiB"), a '
        "cache=DiskCache(...) for the chunks that memory can't keep, or order=Order(window=5) "
        "would end that.",
    ),
    (
        facts(**READING, chunks=chunks(file_bytes=2**30)),
        "disk",
        "decoded-again",
        "4.0 GiB of memory and 1.0 GiB of the cache folder keep them",
    ),
    (facts(**READING, chunks=chunks(again=0)), "disk", "slow-disk", "NVMe"),
    # The system counts what was read from disks: what was in the page cache wasn't.
    (facts(**READING, disk_bytes=2**30, bytes_read=2**31), "disk", "slow-disk", "NVMe"),
    (facts(**READING, disk_bytes=2**30), "disk", "slow-disk", "NVMe"),
    (facts(**READING, disk_bytes=0), "disk", "slow-read", "0 B read from disks"),
    (facts(**READING, disk_bytes=0, chunks=chunks(again=0)), "disk", "slow-read", "of chunks were"),
    (facts(**READING, load_s=2.0, disk_bytes=0, bytes_read=9), "disk", "slow-disk", "NVMe"),
    (
        facts(**READING, disk_bytes=4096, bytes_read=2**30, shards=FILES),
        "disk",
        "slow-read",
        "`penstock pack /data/set DST`) has no files to open",
    ),
    (facts(**READING, disk_bytes=0, shards=FILES), "disk", "slow-read", "fewer fields"),
    (facts(**READING, fill_s=0.9), "decode", "slow-decode", "num_workers="),
    (facts(**READING, remote=remote()), "remote", "slow-remote", "penstock warm"),
    (facts(**READING, remote=remote(), shards=TINY), "remote", "tiny-shards", "64MiB"),
    (facts(**READING, remote=remote(), shards=FILES), "remote", "tiny-shards", "of its own"),
    (facts(**READING, remote=remote(), shards=USUAL), "remote", "slow-remote", "warm"),
    (facts(**READING, remote=remote(max_bytes=0)), "remote", "no-cache", "cache=DiskCache("),
    (facts(**READING, remote=remote(throttled=40)), "remote", "throttled", "40 of 100"),
    (facts(**READING, remote=remote(remote_wait_s=0.1)), "disk", "slow-disk", "NVMe"),
    (
        facts(**READING, remote=remote(bytes_peers=2 * 10**9, peer_requests=50, peer_failed=5)),
        "peers",
        "slow-peers",
        "from other nodes' caches so far, 173.4 MiB/s; 5 of 50 requests failed.",
    ),
    (
        facts(**READING, remote=remote(kept_bytes=4 * 10**8, bytes_passed=2 * 10**9)),
        "cache",
        "small-cache",
        "keeps 40%",
    ),
]


@pytest.mark.parametrize(("planted", "limit", "cause", "told"), PLANTED)
def test_the_verdict_names_what_was_planted(
    planted: LoaderFacts, limit: Limit, cause: Cause, told: str
) -> None:
    found = diagnose(planted)
    assert (found.limit, found.cause) == (limit, cause)
    assert told in found.verdict
    assert found.advice in found.verdict
    assert "  " not in found.verdict


def test_every_limit_and_cause_is_planted() -> None:
    assert {limit for _, limit, _, _ in PLANTED} == set(get_args(Limit))
    assert {cause for _, _, cause, _ in PLANTED} == set(get_args(Cause))


def test_a_prediction_is_amdahls_of_the_measured_work() -> None:
    """Decoding is 1.4 of 2.0 CPU-seconds, so 0.7; all images are progressive and take twice as
    long as the same ones as baseline JPEGs."""
    found = diagnose(facts(images=PROGRESSIVE, ceilings=MEASURED))
    expected = 100 / (0.3 + 0.7 / 2.0)
    assert found.predicted_samples_per_s == pytest.approx(expected)
    assert "decoding is 70% of the work" in found.basis
    assert (
        "Predicted, if the other images are like those inspected and decoding stays the limit: "
        f"{expected:,.0f} samples/s" in found.verdict
    )


def test_pixels_alone_predict_nothing_if_augmenting_was_not_measured() -> None:
    tiny = images(mean_pixels=49_000.0, out_short=32, pack_short=37, mean_short_pixels=1_700.0)
    found = diagnose(facts(images=tiny))
    assert (found.cause, found.predicted_samples_per_s) == ("oversized", None)
    assert "Predicted" not in found.verdict
    assert diagnose(facts(images=tiny, ceilings=ALONE)).predicted_samples_per_s


@pytest.mark.parametrize("ceilings", [None, ALONE])
def test_what_progressive_images_cost_is_measured_or_not_told(ceilings: Ceilings | None) -> None:
    found = diagnose(facts(images=PROGRESSIVE, ceilings=ceilings))
    assert (found.cause, found.predicted_samples_per_s) == ("progressive", None)
    assert "`penstock bench` measures how much longer" in found.verdict
    assert "times" not in found.verdict


def test_whom_progressive_images_were_compared_with_is_told() -> None:
    beside = replace(ALONE, progressive=replace(TWICE, of_twins=False))
    assert "as the baseline ones (16 measured)" in (
        diagnose(facts(images=PROGRESSIVE, ceilings=beside)).verdict
    )
    assert "the same images as baseline ones" in (
        diagnose(facts(images=PROGRESSIVE, ceilings=MEASURED)).verdict
    )


@pytest.mark.parametrize("planted", [planted for planted, *_ in PLANTED])
def test_every_prediction_names_what_it_assumes(planted: LoaderFacts) -> None:
    for ceilings in (planted.ceilings, MEASURED, HEAVY):
        found = diagnose(replace(planted, ceilings=ceilings))
        if found.predicted_samples_per_s is None:
            assert not found.assumes
        else:
            assert found.basis
            assert re.search(rf"\b[Ii]f {re.escape(found.assumes)}[:,]", found.verdict)


@pytest.mark.parametrize("planted", [planted for planted, *_ in PLANTED])
def test_a_verdict_has_one_share_of_one_ceiling(planted: LoaderFacts) -> None:
    for ceilings in (planted.ceilings, MEASURED, HEAVY):
        found = diagnose(replace(planted, ceilings=ceilings))
        shares = re.findall(r"(\d+)% of the [\d,]+/s", found.verdict)
        if found.limit in ("model", "python") or found.of_ceiling is None:
            assert shares == []
        else:
            assert shares == [f"{100 * found.of_ceiling:.0f}"]


def test_a_prediction_ends_where_the_next_stage_does() -> None:
    large = facts(images=LARGE, ceilings=replace(ALONE, read=rate(170.0)))
    found = diagnose(large)
    assert found.predicted_samples_per_s == 170.0
    assert "then reading would be the limit" in found.basis
    stepped = diagnose(replace(large, step_s=8.0, wait_s=2.0))
    assert stepped.predicted_samples_per_s == 125.0
    assert "then the training step would be the limit" in stepped.basis


def test_what_is_left_without_the_remote_are_the_other_stages() -> None:
    alone = replace(ALONE, remote=rate(125.0), read=None)
    found = diagnose(facts(**READING, remote=remote(), ceilings=alone))
    assert found.of_ceiling == pytest.approx(100 / 125)
    assert "80% of the 125/s that fetching alone reached" in found.verdict
    assert found.predicted_samples_per_s == 110.0
    assert "then decoding and augmenting would be the limit" in found.basis
    warm = diagnose(facts(**READING, remote=remote(), ceilings=replace(alone, read=rate(105.0))))
    assert warm.predicted_samples_per_s == 105.0  # reading what is here takes as long


def test_nothing_is_predicted_from_nothing() -> None:
    found = diagnose(facts(**READING, remote=remote()))
    assert found.predicted_samples_per_s is None
    assert found.of_ceiling is None
    assert "Predicted" not in found.verdict


@pytest.mark.parametrize(("alone", "is_told"), [(102.0, False), (130.0, True)])
def test_a_prediction_that_gains_next_to_nothing_is_left_out(alone: float, is_told: bool) -> None:
    found = diagnose(facts(images=LARGE, ceilings=replace(ALONE, read=rate(alone))))
    assert found.predicted_samples_per_s == alone
    assert ("times as many" in found.verdict) is is_told


def test_a_slow_model_is_told_what_it_could_be_fed() -> None:
    found = diagnose(facts(step_s=10.0, wait_s=0.0, ceilings=ALONE))
    assert found.predicted_samples_per_s == 110.0
    assert "could feed up to 110 samples/s" in found.verdict
    assert found.of_ceiling == 1.0


def test_a_warm_up_is_left_out() -> None:
    warm_up, whole = facts(samples=100, batches=1, wait_s=4.0), facts()
    left = growth(whole, warm_up)
    assert (left.samples, left.batches, left.wait_s, left.step_s) == (900, 9, 5.0, 0.0)
    assert left.decode_threads == 2
    earlier = replace(warm_up, remote=remote(requests=40, request_s=20.0))
    later = growth(replace(whole, remote=remote(requests=100, request_s=44.0)), earlier).remote
    assert later is not None
    assert (later.traffic.requests, later.traffic.request_s) == (60, 24.0)
    assert later.kept_bytes == 10**9


times = st.floats(0, 1e4)


@examples(200)
@given(
    step_s=times,
    wait_read_s=times,
    wait_decode_s=times,
    load_s=times,
    gil_late=st.floats(0, 1),
    device=st.sampled_from(["cpu", "cuda:0"]),
    workers=st.sampled_from([None, 0, 2]),
    far=st.sampled_from([None, remote(), remote(max_bytes=0), remote(throttled=99)]),
    shards=st.sampled_from([None, TINY, USUAL, FILES]),
    images=st.sampled_from([None, images(), LARGE, PROGRESSIVE]),
    cores=st.sampled_from([None, SLOW_CORE]),
    ceilings=st.sampled_from([None, ALONE, HEAVY, Ceilings(read=rate(20.0))]),
)
def test_any_run_has_a_verdict_that_gains(
    step_s: float,
    wait_read_s: float,
    wait_decode_s: float,
    load_s: float,
    gil_late: float,
    device: str,
    workers: int | None,
    far: TierFacts | None,
    shards: ShardFigures | None,
    images: ImageFigures | None,
    cores: CoreSpeeds | None,
    ceilings: Ceilings | None,
) -> None:
    run = facts(
        step_s=step_s,
        wait_s=wait_read_s + wait_decode_s,
        wait_read_s=wait_read_s,
        wait_decode_s=wait_decode_s,
        load_s=load_s,
        gil_late=gil_late,
        device=device,
        workers=workers,
        remote=far,
        shards=shards,
        images=images,
        cores=cores,
        ceilings=ceilings,
    )
    found = diagnose(run)
    assert found.limit in get_args(Limit)
    assert found.cause in get_args(Cause)
    assert found.verdict
    assert found.advice in found.verdict
    if found.predicted_samples_per_s is not None:
        assert found.predicted_samples_per_s >= run.samples_per_s
        assert found.basis
    if ceilings is None and found.limit not in ("model", "python"):
        assert found.of_ceiling is None


def test_without_a_training_step_none_is_named() -> None:
    loop = facts(**READING, step_s=3.0, disk_bytes=2**30, trains=False, ceilings=Ceilings())
    found = diagnose(loop)
    assert "training step" not in found.verdict
    assert found.predicted_samples_per_s is None
    assert "a loop that only takes batches waits" in found.verdict
    assert diagnose(replace(loop, trains=True)).predicted_samples_per_s is not None
    free = diagnose(facts(step_s=10.0, wait_s=0.1, trains=False))
    assert free.verdict.startswith("The loop that takes the batches is the limit")


def test_no_share_above_a_ceiling_is_shown() -> None:
    slower = replace(ALONE, read=rate(50.0))
    found = diagnose(facts(**READING, ceilings=slower))
    assert "(reading alone reached no more than 50/s)" in found.verdict
