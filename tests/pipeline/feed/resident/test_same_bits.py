"""With resident= batches have the same bits on the CPU, and nearly the same on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.utils.data

from penstock.augment import CutMix, MixUp
from penstock.pipeline import Order, World
from tests.conftest import SAMPLES
from tests.images import jpeg, picture, rotated_jpeg, sixteen_bit_png

if TYPE_CHECKING:
    from pathlib import Path

from tests.pipeline.feed.resident.resident_loaders import RECIPES, bits, encoded, epochs, make

pytestmark = [
    pytest.mark.filterwarnings("ignore:Labels cluster inside shards"),
    pytest.mark.filterwarnings("ignore:Sample .* is bad"),
    pytest.mark.filterwarnings("ignore:.* is remote and cache= isn't given"),
]


class TestSameBits:
    @pytest.mark.parametrize(
        ("kind", "recipe"),
        [
            *(("pack", recipe) for recipe in RECIPES),
            ("folder", "train"),
            *(
                pytest.param("folder", recipe, marks=pytest.mark.grid)
                for recipe in RECIPES
                if recipe != "train"
            ),
        ],
    )
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
            "order": Order(lanes=4, reshuffle=reshuffle),
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
