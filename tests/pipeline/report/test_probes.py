"""Probes of the GIL and of images, and speeds of cores."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.report import ReadProbe, core_speeds, probes
from penstock.readers import EncodedBatch
from tests.images import jpeg
from tests.properties import examples


def batch(samples: list[bytes], dims: list[tuple[int, int]]) -> EncodedBatch:
    return EncodedBatch(
        ids=np.arange(len(samples)),
        encoded=[np.frombuffer(sample, np.uint8) for sample in samples],
        dims=np.array(dims, np.int32).reshape(-1, 2),
    )


def test_pictures_are_what_was_read() -> None:
    probe = ReadProbe()
    some = [jpeg(1, 64, 128), jpeg(2, 128, 64, progressive=True)]
    probe.sample(batch(some, [(64, 128), (128, 64)]))
    found = probe.images((28, 56))
    assert found is not None
    assert (found.seen, found.progressive) == (2, 0.5)
    assert found.mean_bytes == sum(map(len, some)) / 2
    assert found.mean_pixels == 64 * 128
    assert (found.out_short, found.pack_short) == (28, 32)
    assert found.mean_short_pixels == 32 * 64


def test_images_that_are_small_enough_stay_as_they_are() -> None:
    probe = ReadProbe()
    probe.sample(batch([jpeg(1, 64, 128)], [(64, 128)]))
    found = probe.images((224, 224))
    assert found is not None
    assert found.mean_short_pixels == found.mean_pixels


def test_nothing_is_told_of_what_wasnt_seen() -> None:
    probe = ReadProbe()
    assert probe.images((224, 224)) is None
    assert probe.gil() == (0.0, 0.0)
    probe.sample(batch([], []))
    probe.sample(batch([b""], [(64, 64)]))  # a bad sample
    assert probe.images((224, 224)) is None


def test_looking_ends() -> None:
    probe, one = ReadProbe(), batch([jpeg(1)] * 16, [(24, 32)] * 16)
    for _ in range(200):
        probe.sample(one)
    found = probe.images((224, 224))
    assert found is not None
    assert found.seen == 256


def test_many_threads_may_sample() -> None:
    probe, one = ReadProbe(), batch([jpeg(1)], [(24, 32)])

    def read() -> None:
        for _ in range(50):
            probe.sample(one)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = probe.images((224, 224))
    assert found is not None
    assert found.progressive == 0


def test_cores_are_those_that_may_be_used_and_nobody_is_moved() -> None:
    before = os.sched_getaffinity(0)
    found = core_speeds(seconds=0.01)
    assert os.sched_getaffinity(0) == before
    assert set(found.numbers) == before
    assert max(found.speeds) == 1.0
    assert all(0 < speed <= 1 for speed in found.speeds)


@given(rates=st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=8))
@examples(20)
def test_speeds_are_shares_of_the_fastest(rates: list[float]) -> None:
    cores = range(len(rates))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(probes, "allowed_cores", lambda: cores)
        patched.setattr(probes, "_core_work", lambda _: rates.__getitem__)
        patched.setattr(probes, "_PAUSE_S", 0.0)
        speeds = core_speeds().speeds
    assert speeds[rates.index(max(rates))] == 1.0
    assert [speed * max(rates) for speed in speeds] == pytest.approx(rates)
