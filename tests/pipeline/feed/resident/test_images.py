"""Resident images stay within their limit, and the decoder is released and replaced."""

from __future__ import annotations

import gc
import io
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from penstock.augment import (
    RUN_PIXELS,
    RUN_SAMPLES,
    FullImageDecoder,
    GraphPlan,
    check_recipe,
    decode_runs,
)
from penstock.pipeline.feed import ResidentImages
from penstock.readers import Dataset, ImageRange
from tests.conftest import SAMPLES
from tests.properties import examples

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.readers.fieldtypes import SampleBatch

from tests.pipeline.feed.resident.resident_loaders import (
    RECIPES,
    bits,
    epochs,
    make,
    read_batch,
    reading,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Labels cluster inside shards"),
    pytest.mark.filterwarnings("ignore:Sample .* is bad"),
    pytest.mark.filterwarnings("ignore:.* is remote and cache= isn't given"),
]


def resident_images(path: Path, max_bytes: int) -> ResidentImages:
    index = Dataset(str(path)).index
    recipe = check_recipe(RECIPES["train"], images=index.images["image"])
    return ResidentImages(
        GraphPlan(recipe, batch_size=RUN_SAMPLES, threads=1),
        image="image",
        samples=index.samples,
        max_bytes=max_bytes,
    )


class TestResidentImages:
    @examples(15)
    @given(
        batches=st.lists(
            st.lists(st.integers(0, SAMPLES - 1), max_size=12), min_size=1, max_size=6
        ),
        max_bytes=st.integers(0, 400_000),
    )
    def test_a_batch_is_what_was_read_and_the_bound_holds(
        self, pack: Path, batches: list[list[int]], max_bytes: int
    ) -> None:
        store, asked = resident_images(pack, max_bytes), list[int]()

        def read(ids: Any, _: dict[int, str]) -> SampleBatch:
            asked.extend(ids.tolist())
            return read_batch(pack, ids.tolist())

        for ids in batches:
            here = [image is not None for image in store.images(np.array(ids, np.int64))]
            before = len(asked)
            batch = store.read(np.array(ids, np.int64), {}, read)
            assert asked[before:] == [
                i for i, is_here in zip(ids, here, strict=True) if not is_here
            ]
            wanted = read_batch(pack, ids)
            assert batch.ids.tolist() == ids
            encoded, there = batch.encoded("image"), wanted.encoded("image")
            assert (encoded.dims == there.dims).all()
            labels = batch.columns["label"].values, wanted.columns["label"].values
            assert (labels[0] == labels[1]).all()
            for row, image in enumerate(store.images(batch.ids)):
                assert image is None or image.shape == (*there.dims[row], 3)
                assert bool(len(encoded.encoded[row])) != here[row]
        facts = store.facts()
        assert facts.size_bytes <= max_bytes
        assert facts.samples == sum(image is not None for image in store.images(np.arange(SAMPLES)))
        store.close()

    def test_a_full_arena_changes_no_bits(
        self, pack: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Batches of samples that are there and samples that aren't."""
        plain = epochs(pack, 3)
        monkeypatch.setattr(
            "penstock.pipeline.feed.resident_images.resident_bytes", lambda *_, **__: 900_000
        )
        with make(pack, resident=True) as loader:
            found = [bits(loader) for _ in range(3)]
            told = loader.statistics()
        assert found == plain[0]
        assert 0 < told.resident_bytes <= 900_000
        assert 0 < told.resident_hits < 2 * SAMPLES

    def test_without_memory_the_job_goes_on(
        self, pack: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        plain = epochs(pack, 2)[0]
        with monkeypatch.context() as patch:
            patch.setattr(
                "penstock.pipeline.feed.resident_images.resident_bytes", lambda *_, **__: 2**60
            )
            with make(pack, resident=True) as loader:
                first = bits(loader)
        with make(pack, resident=True) as loader:
            assert [first] == [bits(loader)]
        assert first == plain[0]
        assert "of memory for decoded images can't be allocated" in caplog.text

    def test_closing_waits_for_a_fill_and_ends_it(
        self, pack: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = resident_images(pack, 10**7)
        began, go_on = threading.Event(), threading.Event()
        decode = FullImageDecoder.__call__

        def held(self: FullImageDecoder, *arguments: Any) -> Any:
            began.set()
            assert go_on.wait(30)
            return decode(self, *arguments)

        monkeypatch.setattr(FullImageDecoder, "__call__", held)
        ids = np.arange(5)
        filling = threading.Thread(target=store.read, args=(ids, {}, reading(pack)))
        filling.start()
        assert began.wait(30)
        closing = threading.Thread(target=store.close)
        closing.start()
        go_on.set()
        filling.join(30)
        closing.join(30)
        assert not filling.is_alive()
        assert not closing.is_alive()
        assert store.images(ids) == [None] * 5
        store.read(ids, {}, reading(pack))  # after the end nothing is kept
        assert store.images(ids) == [None] * 5

    def test_an_idle_decoder_is_let_go_and_made_again(
        self, pack: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ResidentImages, "idle_batches", 3)
        made: list[weakref.ref[FullImageDecoder]] = []

        def counting(*arguments: Any, **options: Any) -> FullImageDecoder:
            decoder = FullImageDecoder(*arguments, **options)
            made.append(weakref.ref(decoder))
            return decoder

        monkeypatch.setattr("penstock.pipeline.feed.resident_images.FullImageDecoder", counting)
        store, read = resident_images(pack, 10**7), reading(pack)
        for ids in (range(4), *[range(2)] * 2, range(6), *[range(3)] * 3):
            assert made == [] or made[0]() is not None
            store.read(np.arange(ids.stop), {}, read)
        gc.collect()
        assert [decoder() for decoder in made] == [None]
        store.read(np.arange(9), {}, read)
        assert len(made) == 2
        store.close()

    def test_an_interrupted_decoder_is_replaced(
        self, pack: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = resident_images(pack, 10**7)

        decode = FullImageDecoder.__call__

        def interrupted(self: FullImageDecoder, *arguments: Any) -> Any:
            yield next(iter(decode(self, *arguments)))
            raise MemoryError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(FullImageDecoder, "__call__", interrupted)
            with pytest.raises(MemoryError, match="planted"):
                store.read(np.arange(150), {}, reading(pack))
        store.read(np.arange(150), {}, reading(pack))
        for sample_id, image in enumerate(store.images(np.arange(150))):
            with Image.open(
                io.BytesIO(bytes(read_batch(pack, [sample_id]).columns["image"].samples[0]))
            ) as picture_:
                assert image.shape[:2] == (picture_.height, picture_.width)
                pillow = np.asarray(picture_.convert("RGB")).astype(int)
            assert np.abs(image.astype(int) - pillow).mean() < 2
        store.close()


class TestWholeDecoder:
    @given(pixels=st.lists(st.integers(1, 2 * RUN_PIXELS), max_size=300))
    def test_runs_are_bounded_and_whole(self, pixels: list[int]) -> None:
        found = list(decode_runs(pixels))
        assert [row for run in found for row in run] == list(range(len(pixels)))
        for run in found:
            assert 1 <= len(run) <= RUN_SAMPLES
            assert len(run) == 1 or sum(pixels[row] for row in run) <= RUN_PIXELS

    def test_good_ones_beside_bad_ones(self, pack: Path) -> None:
        batch = read_batch(pack, range(90)).encoded("image")
        recipe = check_recipe(
            RECIPES["eval"],
            images=ImageRange(min_height=1, max_height=200, min_width=1, max_width=200),
        )
        bad = {3, 64, 89}
        samples = [
            sample[: len(sample) // 2] if row in bad else sample
            for row, sample in enumerate(batch.encoded)
        ]
        decoder = FullImageDecoder(GraphPlan(recipe, batch_size=RUN_SAMPLES, threads=2))
        for _ in range(2):
            taken = decoder(samples, batch.dims.prod(axis=1))
            seen = {row: tuple(image.shape) for run in taken for row, image in run}
            assert seen == {
                row: (*batch.dims[row].tolist(), 3) for row in range(90) if row not in bad
            }
