"""resident=: the same bits as without it, read and decoded once, within its bounds."""

from __future__ import annotations

import functools
import gc
import io
import json
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from benchmarks import resident as benchmark
from benchmarks.photographs import PHOTOGRAPHS
from penstock.augment import (
    CenterCrop,
    CutMix,
    Decode,
    MixUp,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    imagenet_eval,
    imagenet_train,
)
from penstock.augment.recipe import check_recipe
from penstock.augment.whole import RUN_PIXELS, RUN_SAMPLES, WholeDecoder, runs
from penstock.cache import DiskCache
from penstock.cache.base.limits import available_memory_bytes
from penstock.cache.errors import ConfigError
from penstock.pipeline import DataLoader, World
from penstock.pipeline.feed.resident.images import ResidentImages
from penstock.pipeline.feed.resident.room import (
    ASKED_SHARE,
    AUTO_MAX_BYTES_CPU,
    AUTO_SHARE_CPU,
    decoded_bytes,
    resident_bytes,
    room_for,
    share_of_rank,
)
from penstock.pipeline.plan.order import Plan
from penstock.pipeline.plan.settings import PlanSettings
from penstock.pipeline.plan.steps import Cursor, Walk
from penstock.readers import Dataset
from penstock.readers.types import EncodedBatch, ImageFacts, ImageRange, Rejection
from tests.conftest import SAMPLES, photograph
from tests.images import jpeg, picture, rotated_jpeg, sixteen_bit_png
from tests.servers import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from penstock.readers.types import Encoded

pytestmark = [
    pytest.mark.filterwarnings("ignore:Labels cluster inside shards"),
    pytest.mark.filterwarnings("ignore:Sample .* is bad"),
    pytest.mark.filterwarnings("ignore:.* is remote and cache= isn't given"),
]

FIELDS = ("image", "label", "id")
SIZE = 24
GREY = (Decode("gray"), Resize(28), CenterCrop(SIZE), Normalize((0.5,), (0.2,)))
GREY_TRAIN = (
    Decode("gray"),
    RandomResizedCrop(SIZE),
    RandomHorizontalFlip(),
    Normalize((0.5,), (0.2,)),
)
RECIPES = {
    "train": imagenet_train(SIZE),
    "eval": imagenet_eval(SIZE, resize=28),
    "grey": GREY,
    "grey train": GREY_TRAIN,
}


def make(path: Path, **options: Any) -> DataLoader:
    given: dict[str, Any] = {
        "batch_size": 1 if "global_batch_size" in options else 16,
        "shuffle": True,
        "seed": 7,
        "augment": RECIPES["train"],
        "num_workers": 2,
        **options,
    }
    return DataLoader(Dataset(str(path), fields=FIELDS), **given)


def bits(batches: Iterable[Any]) -> list[list[bytes]]:
    return [[tensor.numpy().tobytes() for tensor in batch] for batch in batches]


def epochs(path: Path, count: int, **options: Any) -> tuple[list[Any], list[Any]]:
    """All batches of some epochs; the state after each epoch, and the bad samples till then."""
    with make(path, **options) as loader:
        found = [
            (bits(loader), (loader.state_dict(), loader.statistics().bad)) for _ in range(count)
        ]
    return [batches for batches, _ in found], [told for _, told in found]


class TestSameBits:
    @pytest.mark.parametrize("kind", ["folder", "pack"])
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_as_without_it(self, kind: str, recipe: str, request: pytest.FixtureRequest) -> None:
        path = request.getfixturevalue(kind)
        options = {"augment": RECIPES[recipe], "batch_size": 37}
        assert epochs(path, 3, **options, resident=True) == epochs(path, 3, **options)

    @pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.grid), 64, 256])
    def test_at_any_batch_size(self, pack: Path, batch_size: int) -> None:
        options = {"batch_size": batch_size, "drop_last": batch_size < 256}
        assert epochs(pack, 2, **options, resident=True) == epochs(pack, 2, **options)

    @pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.grid), 2])
    def test_padded_evaluation_on_several_ranks(self, pack: Path, rank: int) -> None:
        options = {
            "augment": RECIPES["eval"],
            "shuffle": False,
            "pad": "mask",
            "world": World(rank, 3),
            "batch_size": 9,
        }
        assert epochs(pack, 2, **options, resident=True) == epochs(pack, 2, **options)

    @pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.grid), 1])
    @pytest.mark.parametrize("reshuffle", [0.0, 0.5])
    def test_training_on_several_ranks(self, pack: Path, rank: int, reshuffle: float) -> None:
        options = {
            "world": World(rank, 2),
            "drop_last": True,
            "batch_size": 8,
            "lanes": 4,
            "reshuffle": reshuffle,
        }
        assert epochs(pack, 3, **options, resident=True) == epochs(pack, 3, **options)

    @pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.grid)])
    def test_mixed_with_other_ranks_samples(self, pack: Path, rank: int) -> None:
        options = {
            "world": World(rank, 2),
            "drop_last": True,
            "global_batch_size": 15,
            "augment": (*RECIPES["train"], MixUp(alpha=1.0), CutMix()),
        }
        assert epochs(pack, 3, **options, resident=True) == epochs(pack, 3, **options)

    @pytest.mark.parametrize(
        "stop", [*(pytest.param(stop, marks=pytest.mark.grid) for stop in (0, 1, 13, 26)), 5, 20]
    )
    def test_resumed_anywhere(self, pack: Path, stop: int) -> None:
        with make(pack) as loader:
            whole = [batch for _ in range(4) for batch in bits(loader)]
        with make(pack, resident=True) as loader:
            steps = len(loader)
            for _ in range(stop // steps):
                bits(loader)
            batches = iter(loader)
            first = [bits([next(batches)]) for _ in range(stop % steps)]
            state = loader.state_dict()
        assert len(first) == stop % steps
        with make(pack, resident=True) as loader:
            loader.load_state_dict(state)
            rest = bits(loader) + bits(loader)
        assert rest == whole[stop : stop + len(rest)]

    def test_every_kind_of_file(self, tmp_path: Path) -> None:
        """EXIF orientations, grey, palette, transparent and 16-bit images, of their own sizes."""
        files = {
            "turned.jpg": rotated_jpeg(1, 40, 56),
            "plain.jpg": jpeg(2, 40, 56),
            "grey.jpg": encoded(picture(3, 44, 60, "L"), "JPEG"),
            "cmyk.jpg": encoded(picture(4, 44, 60, "CMYK"), "JPEG"),
            "progressive.jpg": jpeg(5, 70, 50, progressive=True),
            "palette.png": encoded(picture(6, 40, 50, "P"), "PNG"),
            "alpha.png": encoded(picture(7, 40, 50, "RGBA"), "PNG"),
            "bits.png": sixteen_bit_png(8),
            "web.webp": encoded(picture(9, 61, 43), "WEBP"),
        }
        (tmp_path / "a").mkdir()
        for name, data in files.items():
            (tmp_path / "a" / name).write_bytes(data)
        for recipe in (RECIPES["train"], RECIPES["grey train"]):
            options: dict[str, Any] = {"augment": recipe, "batch_size": 4}
            assert epochs(tmp_path, 3, **options, resident=True) == epochs(tmp_path, 3, **options)

    def test_whole_images_without_a_recipe(self, same_size: Path) -> None:
        options: dict[str, Any] = {"augment": None, "batch_size": 7}
        assert epochs(same_size, 3, **options, resident=True) == epochs(same_size, 3, **options)


def credulous(samples: Sequence[Encoded]) -> list[ImageFacts | Rejection]:
    """Believes anything to be an image of 200 x 240."""
    return [ImageFacts(height=200, width=240, channels=3, codec="jpeg") for _ in samples]


@pytest.fixture(scope="module")
def same_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 JPEGs of 40 x 48."""
    root = tmp_path_factory.mktemp("same") / "set"
    for number in range(30):
        path = root / f"class-{number % 3}" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number, 40, 48))
    return root


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 JPEGs of 200 x 240. Four are cut off: windows above that still decode; two have no
    header at all. Whoever indexed them believed anything."""
    root = tmp_path_factory.mktemp("damaged") / "set"
    for number in range(30):
        image = Image.fromarray(np.resize(photograph(number), (200, 240, 3)))
        data = encoded(image, "JPEG")
        if number % 7 == 3:
            data = data[: len(data) * 9 // 10]
        elif number % 13 == 5:
            data = data[:20] + b"no header" * 30
        path = root / f"class-{number % 3}" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.readers.fields.verify.check_jpeg", lambda *_: None)
        Dataset(str(root)).open(verify=credulous)
    return root


class TestBadSamples:
    @pytest.mark.parametrize("recipe", ["train", "eval"])
    def test_the_same_are_told_and_replaced(self, damaged: Path, recipe: str) -> None:
        options = {"augment": RECIPES[recipe], "batch_size": 5, "max_bad": 1.0}
        there, plain = (
            epochs(damaged, 4, **options, resident=resident) for resident in (True, False)
        )
        assert there == plain
        counted = np.diff([bad for _, bad in plain[1]], prepend=0).tolist()
        everywhere = sum(number % 7 == 3 or number % 13 == 5 for number in range(30))
        if recipe == "eval":
            assert counted == [everywhere] * 4
        else:
            assert 0 < min(counted) <= max(counted) <= everywhere
            assert sum(counted) < 4 * everywhere  # some windows miss the damage

    def test_the_same_are_masked(self, damaged: Path) -> None:
        options = {
            "augment": RECIPES["eval"],
            "batch_size": 8,
            "max_bad": 1.0,
            "shuffle": False,
            "pad": "mask",
        }
        there, plain = epochs(damaged, 3, **options, resident=True), epochs(damaged, 3, **options)
        assert there == plain
        valid = np.concatenate([np.frombuffer(batch[-1], np.bool_) for batch in plain[0][0]])
        assert 0 < valid.sum() < 30

    def test_what_was_checked_once_is_trusted(self, same_size: Path, tmp_path: Path) -> None:
        """Files that go after the first epoch are neither read nor missed."""
        root = tmp_path / "set"
        for path in same_size.rglob("*.jpg"):
            (root / path.parent.name).mkdir(parents=True, exist_ok=True)
            (root / path.parent.name / path.name).write_bytes(path.read_bytes())
        wanted = epochs(root, 3, batch_size=5)
        with make(root, batch_size=5, resident=True) as loader:
            first = bits(loader)
            bits(loader)  # batches of the next epoch are read ahead: by now all are there
            for path in root.rglob("*.jpg"):
                path.unlink()
            third = bits(loader)
        assert [first, third] == [wanted[0][0], wanted[0][2]]


@functools.cache
def pixels_of_all() -> int:
    """Bytes of all photographs, RGB."""
    return sum(photograph(number).size for number in range(SAMPLES))


class TestOnce:
    def test_each_sample_is_read_once(self, pack: Path) -> None:
        dataset = Dataset(str(pack), fields=FIELDS)
        size = sum(
            int(table[:, 1].sum() - table[:, 0].sum())
            for table in (
                dataset.index.shards.open(n).table for n in range(len(dataset.index.sizes))
            )
        )
        with DataLoader(
            dataset, 16, shuffle=True, seed=7, augment=RECIPES["train"], resident=True
        ) as loader:
            for _ in range(3):
                bits(loader)
            found = loader.statistics()
        assert dataset.traffic().bytes_disk == found.bytes_disk == size
        pixels = pixels_of_all()
        assert found.resident_bytes == pixels
        assert 2 * SAMPLES <= found.resident_hits < 3 * SAMPLES  # batches in flight among them
        assert 2 * pixels <= found.bytes_memory < 3 * pixels
        assert "came from memory" in str(found)

    @pytest.mark.parametrize("with_cache", [False, True])
    def test_a_remote_is_asked_for_each_sample_once(
        self, pack: Path, tmp_path: Path, with_cache: bool
    ) -> None:
        plain = epochs(pack, 4)[0]
        cache = DiskCache(tmp_path / "cache", max_bytes="64MiB") if with_cache else None
        with serving(pack.parent) as server:
            dataset = Dataset(f"{server.url}/{pack.name}", fields=FIELDS, cache=cache)
            with (
                dataset,
                DataLoader(
                    dataset, 16, shuffle=True, seed=7, augment=RECIPES["train"], resident=True
                ) as loader,
            ):
                found = [bits(loader), bits(loader)]
                fetched = loader.statistics().bytes_remote
                found += [bits(loader), bits(loader)]
                told = loader.statistics()
        assert found == plain
        assert told.bytes_remote == fetched
        assert told.resident_hits >= 3 * SAMPLES

    def test_without_it_nothing_is_kept(self, pack: Path) -> None:
        with make(pack) as loader:
            bits(loader)
            found = loader.statistics()
        assert (found.resident_bytes, found.resident_hits, found.bytes_memory) == (0, 0, 0)
        assert "came from memory" not in str(found)

    def test_the_memory_is_given_back(self, pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        arenas: list[weakref.ref[Any]] = []
        keep = ResidentImages._keep

        def noting(self: ResidentImages, *arguments: Any) -> None:
            keep(self, *arguments)
            if not arenas:
                arenas.append(weakref.ref(self._arena))

        monkeypatch.setattr(ResidentImages, "_keep", noting)
        loader = make(pack, resident=True)
        batches = list(loader)
        assert arenas[0]() is not None
        loader.close()
        gc.collect()
        assert arenas[0]() is None
        assert batches[0][0].isfinite().all()  # what was handed out lies elsewhere


def read_batch(path: Path, ids: Sequence[int]) -> EncodedBatch:
    dataset = Dataset(str(path), fields=FIELDS)
    starts, wanted = dataset.index.starts, np.array(ids, np.int64)
    shards = np.searchsorted(starts, wanted, side="right") - 1
    return dataset.read(np.stack([shards, wanted - starts[shards]], axis=1))


def reading(path: Path) -> Callable[..., EncodedBatch]:
    return lambda ids, _: read_batch(path, ids.tolist())


def a_store(path: Path, max_bytes: int) -> ResidentImages:
    index = Dataset(str(path)).index
    return ResidentImages(
        check_recipe(RECIPES["train"], images=index.images),
        samples=index.samples,
        max_bytes=max_bytes,
        threads=1,
        device=torch.device("cpu"),
        deterministic=False,
    )


class TestStore:
    @settings(max_examples=15, deadline=None)
    @given(
        batches=st.lists(
            st.lists(st.integers(0, SAMPLES - 1), max_size=12), min_size=1, max_size=6
        ),
        max_bytes=st.integers(0, 400_000),
    )
    def test_a_batch_is_what_was_read_and_the_bound_holds(
        self, pack: Path, batches: list[list[int]], max_bytes: int
    ) -> None:
        store, asked = a_store(pack, max_bytes), list[int]()

        def read(ids: Any, _: dict[int, str]) -> EncodedBatch:
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
            assert (batch.dims == wanted.dims).all()
            assert (batch.columns["label"] == wanted.columns["label"]).all()
            for row, image in enumerate(store.images(batch.ids)):
                assert image is None or image.shape == (*wanted.dims[row], 3)
                assert bool(len(batch.encoded[row])) != here[row]
        facts = store.facts(hits=0, bytes_memory=0)
        assert facts.size_bytes <= max_bytes
        assert facts.samples == sum(image is not None for image in store.images(np.arange(SAMPLES)))
        store.close()

    def test_a_full_arena_changes_no_bits(
        self, pack: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Batches of samples that are there and samples that aren't."""
        plain = epochs(pack, 3)
        monkeypatch.setattr(
            "penstock.pipeline.feed.image_graph.resident_bytes", lambda *_, **__: 900_000
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
        def none(*_: Any, **__: Any) -> Any:
            raise MemoryError("planted")

        plain = epochs(pack, 2)[0]
        with make(pack, resident=True) as loader, monkeypatch.context() as patch:
            patch.setattr(ResidentImages, "_allocate", none)
            first = bits(loader)
        with make(pack, resident=True) as loader:
            assert [first] == [bits(loader)]
        assert first == plain[0]
        assert "for decoded images (planted): none are kept" in caplog.text

    def test_closing_waits_for_a_fill_and_ends_it(
        self, pack: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = a_store(pack, 10**7)
        began, go_on = threading.Event(), threading.Event()
        decode = WholeDecoder.__call__

        def held(self: WholeDecoder, *arguments: Any) -> Any:
            began.set()
            assert go_on.wait(30)
            return decode(self, *arguments)

        monkeypatch.setattr(WholeDecoder, "__call__", held)
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
        monkeypatch.setattr("penstock.pipeline.feed.resident.images._IDLE_BATCHES", 3)
        made: list[weakref.ref[WholeDecoder]] = []
        make_decoder = ResidentImages._make_decoder

        def counting(self: ResidentImages) -> WholeDecoder:
            decoder = make_decoder(self)
            made.append(weakref.ref(decoder))
            return decoder

        monkeypatch.setattr(ResidentImages, "_make_decoder", counting)
        store, read = a_store(pack, 10**7), reading(pack)
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
        store = a_store(pack, 10**7)

        def stumbling(*_: Any) -> Any:
            raise MemoryError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(ResidentImages, "_keep", stumbling)
            with pytest.raises(MemoryError, match="planted"):
                store.read(np.arange(150), {}, reading(pack))
        store.read(np.arange(150), {}, reading(pack))
        for sample_id, image in enumerate(store.images(np.arange(150))):
            with Image.open(
                io.BytesIO(bytes(read_batch(pack, [sample_id]).encoded[0]))
            ) as picture_:
                assert image.shape[:2] == (picture_.height, picture_.width)
                pillow = np.asarray(picture_.convert("RGB")).astype(int)
            assert np.abs(image.astype(int) - pillow).mean() < 2
        store.close()


class TestWholeDecoder:
    @given(pixels=st.lists(st.integers(1, 2 * RUN_PIXELS), max_size=300))
    def test_runs_are_bounded_and_whole(self, pixels: list[int]) -> None:
        found = list(runs(pixels))
        assert [row for run in found for row in run] == list(range(len(pixels)))
        for run in found:
            assert 1 <= len(run) <= RUN_SAMPLES
            assert len(run) == 1 or sum(pixels[row] for row in run) <= RUN_PIXELS

    def test_good_ones_beside_bad_ones(self, pack: Path) -> None:
        batch = read_batch(pack, range(90))
        recipe = check_recipe(
            RECIPES["eval"],
            images=ImageRange(min_height=1, max_height=200, min_width=1, max_width=200),
        )
        bad = {3, 64, 89}
        samples = [
            sample[: len(sample) // 2] if row in bad else sample
            for row, sample in enumerate(batch.encoded)
        ]
        decoder = WholeDecoder(recipe, threads=2)
        for _ in range(2):
            taken = decoder(samples, batch.dims.prod(axis=1))
            seen = {row: tuple(image.shape) for run in taken for row, image in run}
            assert seen == {
                row: (*batch.dims[row].tolist(), 3) for row in range(90) if row not in bad
            }


class TestRoom:
    def room(self, mode: Any, monkeypatch: pytest.MonkeyPatch, free: int, ranks: int = 1) -> int:
        monkeypatch.setattr(
            "penstock.pipeline.feed.resident.room.available_memory_bytes", lambda: free
        )
        recipe = check_recipe(
            RECIPES["train"],
            images=ImageRange(min_height=9, max_height=9, min_width=9, max_width=9),
        )
        world = World(0, ranks, local_rank=0, local_size=ranks)
        return room_for(
            mode,
            device=torch.device("cpu"),
            world=world,
            recipe=recipe,
            batch_size=8,
            depth=2,
        ).most_bytes

    @pytest.mark.parametrize("free", [0, 10**9, 10**11])
    @pytest.mark.parametrize("ranks", [1, 8])
    def test_the_rule(self, free: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        auto = self.room("auto", monkeypatch, free, ranks)
        assert auto == min(int(AUTO_SHARE_CPU * free) // ranks, AUTO_MAX_BYTES_CPU)
        assert self.room(True, monkeypatch, free, ranks) == int(ASKED_SHARE * free) // ranks

    def test_what_was_asked_for_and_does_not_fit_is_refused(
        self, pack: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "penstock.pipeline.feed.resident.room.available_memory_bytes", lambda: 1_000_000
        )
        with pytest.raises(ConfigError, match=r"resident=True: .* room for .*50%"):
            make(pack, resident=True)

    def test_auto_keeps_nothing_then_and_says_so(
        self, pack: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(
            "penstock.pipeline.feed.resident.room.available_memory_bytes", lambda: 10_000_000
        )
        with caplog.at_level("INFO", "penstock"), make(pack, resident="auto") as loader:
            bits(loader)
            bits(loader)
            assert loader.statistics().resident_bytes == 0
        assert "resident: no images are kept" in caplog.text

    def test_auto_fetches_nothing_to_find_out(
        self, pack: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with (
            serving(pack.parent) as server,
            caplog.at_level("INFO", "penstock"),
            Dataset(f"{server.url}/{pack.name}", fields=FIELDS) as dataset,
            DataLoader(dataset, 16, augment=RECIPES["eval"], resident="auto") as loader,
        ):
            next(iter(loader))
            assert loader.statistics().resident_bytes == 0
        assert "their decoded size is unknown" in caplog.text

    def test_auto_keeps_what_fits(
        self, pack: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(
            "penstock.pipeline.feed.resident.room.available_memory_bytes", lambda: 10**9
        )
        with caplog.at_level("INFO", "penstock"), make(pack, resident="auto") as loader:
            bits(loader)
            assert loader.statistics().resident_bytes > 0
        assert "resident: " in caplog.text

    @settings(max_examples=20, deadline=None)
    @given(most=st.integers(0, 10**7), channels=st.sampled_from([1, 3]))
    def test_decoded_bytes_are_counted_as_far_as_they_matter(
        self, pack: Path, most: int, channels: int
    ) -> None:
        index = Dataset(str(pack)).index
        exact = pixels_of_all() // 3 * channels
        found = decoded_bytes(index, channels=channels, most=most, only_near=True)
        assert found is not None
        assert found == exact if exact <= most else most < found <= exact

    @pytest.mark.parametrize("cuda", [False, True])
    def test_bookkeeping_counts_too(self, same_size: Path, cuda: bool) -> None:
        from penstock.pipeline.feed.resident.room import SAMPLE_BYTES_CPU, SAMPLE_BYTES_CUDA, Room

        index = Dataset(str(same_size)).index
        recipe = check_recipe(RECIPES["train"], images=index.images)
        pixels = 30 * 40 * 48 * 3
        least = pixels + 30 * (SAMPLE_BYTES_CUDA if cuda else SAMPLE_BYTES_CPU)
        for room, wanted in ((least, pixels), (least - 1, None)):
            got = resident_bytes(
                "auto", Room(most_bytes=room, told=""), index, recipe, share=1.0, cuda=cuda
            )
            assert got == wanted

    @settings(max_examples=25, deadline=None)
    @given(
        sizes=st.lists(st.integers(1, 15), min_size=1, max_size=9),
        lanes=st.sampled_from([1, 2, 3, 4, 6]),
        per_lane=st.integers(1, 4),
        spare=st.integers(0, 1),
        ranks=st.sampled_from([1, 2, 3, 4]),
        reshuffle=st.sampled_from([0.0, 0.5]),
        shuffle=st.booleans(),
    )
    def test_a_rank_reads_no_more_than_its_share(
        self,
        sizes: list[int],
        lanes: int,
        per_lane: int,
        spare: int,
        ranks: int,
        reshuffle: float,
        shuffle: bool,
    ) -> None:
        frozen = PlanSettings(
            seed=3,
            shuffle=shuffle,
            lanes=lanes if shuffle else 1,
            window=2 if shuffle else 1,
            reshuffle=reshuffle if shuffle else 0.0,
        )
        batch = max(lanes * per_lane + spare, ranks)
        plan = Plan(
            np.array(sizes),
            seed=frozen.seed if shuffle else None,
            lanes=frozen.lanes,
            window=frozen.window,
            reshuffle=frozen.reshuffle,
        )
        samples = sum(sizes)
        walk = Walk(samples=samples, global_batch=batch, drop_last=False)
        share = share_of_rank(frozen, global_batch=batch, world=World(0, ranks))
        for rank in range(ranks):
            seen: set[int] = set()
            for epoch in range(3):
                for step in walk.steps(Cursor(epoch, 0), endless=False):
                    at = step.start
                    seen |= set(
                        plan.ids(at.epoch, at.position, batch, rank=rank, world=ranks).tolist()
                    )
            # Lanes differ by one sample, and the last batch of an epoch is cut anew.
            assert len(seen) <= share * samples + 3 * batch


MEMINFO = "MemTotal:  16000 kB\nMemFree: 10 kB\nMemAvailable:   8000 kB\nHugePages_Total: 0\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "free"),
    [
        ("", {}, 8000 * 1024),
        (
            "0::/a\n",
            {
                "sys/fs/cgroup/a/memory.max": "1000000\n",
                "sys/fs/cgroup/a/memory.current": "700000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 200000\n",
            },
            500_000,
        ),
        (
            "0::/a\n",
            {
                "sys/fs/cgroup/a/memory.max": "max\n",
                "sys/fs/cgroup/a/memory.current": "700000\n",
                "sys/fs/cgroup/memory.max": "800000\n",
                "sys/fs/cgroup/memory.current": "750000\n",
            },
            50_000,
        ),
        (
            "5:cpu:/x\n4:memory:/job\n",
            {
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "100000\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "100000\n",
                "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 40000\n",
            },
            40_000,
        ),
        ("0::/a\n", {"sys/fs/cgroup/a/memory.max": "5\n"}, 8000 * 1024),
    ],
)
def test_available_memory_is_what_machine_and_groups_leave(
    tmp_path: Path, cgroup: str, files: dict[str, str], free: int
) -> None:
    for name, text in {"proc/self/cgroup": cgroup, "proc/meminfo": MEMINFO, **files}.items():
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    assert available_memory_bytes(root=tmp_path) == free


def test_a_machine_that_does_not_tell_has_nothing_to_give(tmp_path: Path) -> None:
    assert available_memory_bytes(root=tmp_path) == 0
    assert available_memory_bytes() > 0


class TestRefused:
    @pytest.mark.parametrize("value", ["yes", 1, 0, None, "device"])
    def test_other_values(self, pack: Path, value: object) -> None:
        with pytest.raises(ConfigError, match="resident must be True, False or 'auto'"):
            make(pack, resident=value)

    def test_without_images(self, pack: Path) -> None:
        dataset = Dataset(str(pack), fields=("label",))
        with pytest.raises(ConfigError, match="resident=True keeps decoded images"):
            DataLoader(dataset, 4, resident=True)
        with DataLoader(dataset, 4, resident="auto") as loader:
            assert len(list(loader)) == -(-SAMPLES // 4)

    def test_torch_datasets(self) -> None:
        dataset = torch.utils.data.TensorDataset(torch.arange(4))
        with pytest.raises(ConfigError, match="resident=True works on native datasets"):
            DataLoader(dataset, 2, resident=True)
        with DataLoader(dataset, 2, resident="auto") as loader:
            assert len(list(loader)) == 2


def test_the_benchmark_runs(tmp_path: Path) -> None:
    written = benchmark.measure(
        tmp_path,
        rounds=1,
        photographs=len(PHOTOGRAPHS),
        eval_images=len(PHOTOGRAPHS),
        small=40,
        results=tmp_path / "results",
        console=Console(file=io.StringIO()),
    )
    rounds = json.loads(written.read_text())["rounds"]
    assert {
        what: {name: len(told) for name, told in found.items()} for what, found in rounds.items()
    } == {what: {"plain": 2, "resident": 2} for what in ("photographs", "small")}


@pytest.mark.gpu
class TestOnTheGpu:
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_nearly_as_without_it(self, pack: Path, recipe: str) -> None:
        """Decoding a window and cutting it out may use another decoder there: not the same bits."""
        options = {"augment": RECIPES[recipe], "device": "cuda", "deterministic": True}
        with make(pack, **options) as plain, make(pack, **options, resident=True) as loader:
            for _ in range(3):
                for one, other in zip(plain, loader, strict=True):
                    assert one[2].tolist() == other[2].tolist()
                    assert one[1].tolist() == other[1].tolist()
                    assert other[0].is_cuda
                    assert (one[0] - other[0]).abs().mean() < 0.05
            assert loader.statistics().resident_hits >= 2 * SAMPLES

    def test_epochs_differ_by_their_draws_only(self, same_size: Path) -> None:
        """Without draws, what comes from memory is what came first."""
        options = {"augment": RECIPES["eval"], "device": "cuda", "shuffle": False}
        with make(same_size, **options, resident=True) as loader:
            first, second, third = ([batch[0].cpu() for batch in loader] for _ in range(3))
        for one, *others in zip(first, second, third, strict=True):
            assert all(torch.equal(one, other) for other in others)

    def test_the_memory_is_given_back(self, pack: Path) -> None:
        before = torch.cuda.memory_allocated()
        with make(pack, device="cuda", resident=True) as loader:
            for _ in loader:
                pass
            assert torch.cuda.memory_allocated() - before >= loader.statistics().resident_bytes
        assert torch.cuda.memory_allocated() - before < 10**6


def encoded(image: Image.Image, codec: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, codec)
    return buffer.getvalue()
