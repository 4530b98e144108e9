"""Maps on fields of each kind in containers, and on masks and boxes that follow images."""

from __future__ import annotations

import io
import json
import tarfile
import wave
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

from penstock import (
    Array,
    Boxes,
    DataLoader,
    Dataset,
    Map,
    Mask,
    RandomResizedCrop,
    Tokens,
    Value,
    concat,
)
from penstock.cache import MapError
from penstock.pipeline import World
from tests.pipeline.feed.mapping import functions
from tests.torch_datasets import same

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:Labels cluster inside shards")

SAMPLES, DIMS, SIZE = 20, (24, 30), 16
FIELDS = ("image", "caption", "mask", "vector", "id")


def png(pixels: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def npy(values: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fields") / "set.tar"
    with tarfile.open(path, "w") as archive:
        for number in range(SAMPLES):
            grey = np.full((*DIMS, 3), 10 * number, np.uint8)
            classes = np.full(DIMS, number % 3, np.uint8)
            classes[:, 15:] = 3
            members = {
                "png": png(grey),
                "txt": f"caption {number}".encode(),
                "mask.png": png(classes),
                "vector.npy": npy(np.arange(number % 4, dtype=np.float32)),
                "json": json.dumps({"score": number / 2}).encode(),
            }
            for name, data in members.items():
                member = tarfile.TarInfo(f"{number:03}.{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return path


def make(tar: Path, *maps: Map, fields: Any = FIELDS, **options: Any) -> DataLoader:
    given = {"batch_size": 4, "shuffle": True, "seed": 3, "num_workers": 1, **options}
    recipe: list[Any] = [*maps, RandomResizedCrop(SIZE)] if "image" in fields else [*maps]
    return DataLoader(Dataset(str(tar), fields=fields), augment=recipe, **given)


def all_maps(processes: int = 0) -> list[Map]:
    return [
        Map(functions.tokens, "caption", returns={"tokens": Tokens("int64")}, processes=processes),
        Map(functions.swap_classes, "mask", processes=processes),
        Map(functions.longer, "vector", processes=processes),
        Map(functions.box_of_classes, "mask", returns={"boxes": BOXES}, processes=processes),
    ]


BOXES = Boxes(of="image", format="xywh")


class TestEveryKind:
    def test_values_are_those_of_the_function(self, tar: Path) -> None:
        with make(tar, *all_maps()) as loader:
            for images, captions, masks, vectors, ids, tokens, boxes in loader:
                assert images.shape[1:] == (3, SIZE, SIZE)
                assert masks.shape == (len(ids), SIZE, SIZE)
                for row, number in enumerate(ids.tolist()):
                    assert captions[row] == f"caption {number}"
                    assert tokens[row].tolist() == list(f"caption {number}".encode())
                    assert vectors[row].tolist() == [*range(number % 4), -1]
                    assert set(masks[row].unique().tolist()) <= {100 + number % 3, 3}
                    assert boxes[row].shape[1] == 4

    def test_what_is_made_follows_its_image(self, tar: Path) -> None:
        """The box around a part of the mask is around that part behind the crop too."""
        with make(tar, *all_maps(), batch_size=1) as loader:
            met = 0
            for _, _, masks, _, _, _, boxes in loader:
                part = torch.nonzero(masks[0] == 3)
                if not len(part) or not len(boxes[0]):
                    continue
                met += 1
                x1, y1, x2, y2 = boxes[0][0].tolist()
                low, high = part.min(0).values, part.max(0).values + 1
                # Nearest pixels move an edge by half of one of the source.
                assert abs(low[1] - x1) <= 1.5
                assert abs(low[0] - y1) <= 1.5
                assert abs(high[1] - x2) <= 1.5
                assert abs(high[0] - y2) <= 1.5
            assert met > SAMPLES // 2

    @pytest.mark.parametrize("processes", [1, 2])
    def test_processes_change_nothing(self, tar: Path, processes: int) -> None:
        with make(tar, *all_maps()) as one, make(tar, *all_maps(processes)) as other:
            for mine, theirs in zip(one, other, strict=True):
                for a, b in zip(mine, theirs, strict=True):
                    assert same(list(a), list(b))

    def test_worlds_change_nothing(self, tar: Path) -> None:
        def tokens(**options: Any) -> dict[int, Any]:
            with make(tar, *all_maps(), drop_last=True, **options) as loader:
                return {
                    i: (tokens.tolist(), vector.tolist())
                    for batch in loader
                    for i, tokens, vector in zip(batch[4].tolist(), batch[5], batch[3], strict=True)
                }

        whole = tokens()
        parts = tokens(world=World(0, 2)) | tokens(world=World(1, 2))
        assert all(whole[i] == parts[i] for i in parts.keys() & whole.keys())

    @pytest.mark.parametrize("processes", [0, 1])
    def test_fields_that_are_not_selected_can_be_had(self, tar: Path, processes: int) -> None:
        """And aren't handed out for it, unless they are returned."""
        made = Map(functions.tokens, "caption", returns={"tokens": Tokens()}, processes=processes)
        with make(tar, made, Map(functions.longer, "vector"), fields=("image", "id")) as loader:
            for _, ids, tokens, vectors in loader:
                for row, number in enumerate(ids.tolist()):
                    assert tokens[row].tolist() == list(f"caption {number}".encode())
                    assert vectors[row].tolist() == [*range(number % 4), -1]

    def test_sound_that_nothing_else_decodes(self, tmp_path: Path) -> None:
        with tarfile.open(tmp_path / "sound.tar", "w") as archive:
            for number in range(4):
                buffer = io.BytesIO()
                with wave.open(buffer, "wb") as sound:
                    sound.setparams((1, 2, 8000, 0, "NONE", ""))
                    sound.writeframes(np.full(number + 3, number, np.int16).tobytes())
                member = tarfile.TarInfo(f"{number}.wav")
                member.size = len(buffer.getvalue())
                buffer.seek(0)
                archive.addfile(member, buffer)
        op = Map(functions.frames, "audio", returns={"wave": Array("int16", (None,))})
        dataset = Dataset(str(tmp_path / "sound.tar"), fields=("id",))
        with DataLoader(dataset, 4, augment=[op]) as loader:
            ((ids, waves),) = loader
        assert ids.tolist() == [0, 1, 2, 3]
        assert [one.tolist() for one in waves] == [[i] * (i + 3) for i in range(4)]

    def test_of_a_selection_and_of_datasets_end_to_end(self, tar: Path) -> None:
        made = Map(functions.tokens, "caption", returns={"tokens": Tokens()})
        dataset = Dataset(str(tar), fields=("id",))
        both = concat([dataset.subset(range(3, 9)), dataset.subset(range(2))])
        with DataLoader(both, 3, augment=[made]) as loader:
            found = [text for _, tokens in loader for text in tokens]
        texts = [bytes(text.tolist()).decode() for text in found]
        assert texts == [f"caption {number}" for number in (*range(3, 9), 0, 1)]

    def test_a_value_of_json_without_images(self, tar: Path) -> None:
        op = Map(lambda score: score * 2, "score")
        with make(tar, op, fields=("score", "id")) as loader:
            for scores, ids in loader:
                assert scores.tolist() == ids.tolist()

    def test_bytes_of_images_are_those_of_the_tar(self, tar: Path) -> None:
        op = Map(
            lambda image: np.asarray(Image.open(io.BytesIO(image)))[0, 0, 0],
            "image",
            returns={"grey": Value("uint8")},
        )
        with make(tar, op, fields=("image", "id")) as loader:
            for _, ids, greys in loader:
                assert greys.tolist() == [10 * i for i in ids.tolist()]


class TestMisfits:
    @pytest.mark.parametrize(
        ("op", "words"),
        [
            (Map(lambda mask: mask[1:], "mask"), r"a mask of shape \(23, 30\) .* \(24, 30\)"),
            (Map(lambda mask: mask / 2, "mask"), "float64 of shape"),
            (Map(lambda v: v.astype(np.float64), "vector"), "float64 of shape"),
            (Map(lambda v: v[None], "vector"), r"float32 of shape \(1, "),
            (Map(lambda text: text.encode(), "caption"), "wanted a str"),
            (Map(lambda score: str(score), "score"), "wanted one float32"),
        ],
    )
    def test_they_are_named(self, tar: Path, op: Map, words: str) -> None:
        with (
            make(tar, op, fields=(*FIELDS, "score")) as loader,
            pytest.raises(MapError, match=words) as caught,
        ):
            list(loader)
        assert caught.value.sample_id is not None
        assert "At sample" in str(caught.value)

    def test_a_mask_cannot_be_made_without_its_image(self, tar: Path) -> None:
        op = Map(lambda _: np.zeros((2, 2), np.uint8), "id", returns={"new": Mask(of="image")})
        with make(tar, op) as loader, pytest.raises(MapError, match='as "image" is'):
            list(loader)
