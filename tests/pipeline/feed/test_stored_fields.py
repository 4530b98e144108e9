"""Loaders over the fields of tar files, packs and folders."""

from __future__ import annotations

import io
import os
import re
import tarfile
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock import Boxes, DataLoader, Dataset, Ragged, pack
from penstock.augment import RandomHorizontalFlip, Resize
from penstock.cache import ConfigError, PenstockWarning
from tests.layers import ROOT
from tests.pipeline.feed.memory import png

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

N, SIDE = 40, 20
SCHEMA = {"boxes": Boxes(of="image", format="xywh")}


def caption(i: int) -> str:
    return f"what is on picture number {i:02d} é"


def members(i: int) -> dict[str, bytes]:
    """Every fourth sample has no caption."""
    array = io.BytesIO()
    np.save(array, np.array([[1, 2, 3, 4]] * (i % 3), np.float32).reshape(-1, 4))
    found = {
        "png": png(np.full((SIDE, SIDE, 3), i, np.uint8)),
        "mask.png": png(np.full((SIDE, SIDE), i, np.uint8)),
        "boxes.npy": array.getvalue(),
        "txt": caption(i).encode(),
        "json": b'{"score": %d.5}' % i,
    }
    if i % 4 == 3:
        del found["txt"]
    return found


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stored")
    with tarfile.open(root / "pairs.tar", "w") as archive:
        for i in range(N):
            for name, data in members(i).items():
                member = tarfile.TarInfo(f"{i:03d}.{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    (root / "folder").mkdir()
    for i in range(N):
        for name in ("png", "txt"):
            if name in members(i):
                (root / "folder" / f"{i:03d}.{name}").write_bytes(members(i)[name])
    pack(Dataset(root / "pairs.tar", schema=SCHEMA), root / "pack")
    return root


FIELDS = ("image", "mask", "boxes", "caption", "caption.present", "score")


def open_tar(root: Path, **more: Any) -> Dataset:
    return Dataset(root / "pairs.tar", schema=SCHEMA, **more)


def open_pack(root: Path, **more: Any) -> Dataset:
    return Dataset(root / "pack", **more)


@pytest.mark.parametrize("opened", [open_tar, open_pack])
def test_every_field_of_a_sample_comes_along(stored: Path, opened: Callable[..., Dataset]) -> None:
    seen: list[int] = []
    augment = [RandomHorizontalFlip(), Resize((10, 10))]
    with (
        opened(stored, fields=FIELDS) as dataset,
        DataLoader(dataset, 7, shuffle=True, seed=1, augment=augment) as loader,
    ):
        for image, mask, boxes, captions, present, score in loader:
            assert torch.equal(image[:, 0], mask)
            assert isinstance(boxes, Ragged)
            for row, number in enumerate(score.tolist()):
                i = int(number)
                seen.append(i)
                assert (image[row] == i).all()
                assert bool(present[row]) == (i % 4 != 3)
                assert captions[row] == (caption(i) if i % 4 != 3 else "")
                ours = boxes[row].tolist()
                assert ours in ([[0.5, 1, 2, 3]] * (i % 3), [[8, 1, 9.5, 3]] * (i % 3))
    assert sorted(seen) == list(range(N))


@pytest.mark.parametrize("opened", [open_tar, open_pack])
def test_what_some_lack_is_an_error_that_says_how_many(
    stored: Path, opened: Callable[..., Dataset]
) -> None:
    with (
        opened(stored, fields=("image", "caption")) as dataset,
        pytest.raises(ConfigError, match=r'10 samples of .*"caption.present"'),
    ):
        DataLoader(dataset, 4)
    with opened(stored) as dataset:
        assert "caption" not in dataset.fields
        assert dataset.schema["boxes"] == SCHEMA["boxes"]


def test_captions_beside_images_in_a_folder(stored: Path) -> None:
    fields = ("caption", "image", "caption.present")
    with Dataset(stored / "folder", fields=fields) as dataset, DataLoader(dataset, 8) as loader:
        found = [(bool(p), c, int(x[0, 0, 0])) for b in loader for c, x, p in zip(*b, strict=True)]
    assert sorted(found, key=lambda each: each[2]) == [
        (i % 4 != 3, caption(i) if i % 4 != 3 else "", i) for i in range(N)
    ]


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PenstockWarning)
        yield


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("pad", [None, "mask"])
def test_a_caption_that_was_changed_on_disk_is_a_bad_sample(
    stored: Path, tmp_path: Path, pad: Any
) -> None:
    data = (stored / "pairs.tar").read_bytes()
    path = tmp_path / "pairs.tar"
    path.write_bytes(data)
    with Dataset(path, schema=SCHEMA) as dataset:
        assert len(dataset) == N
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(data.index(caption(5).encode()))
        file.write(b"W")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # so that no index is made anew
    fields = ("image", "caption", "caption.present", "id")
    with (
        Dataset(path, schema=SCHEMA, fields=fields) as dataset,
        DataLoader(dataset, 8, pad=pad, max_bad=0.1) as loader,
    ):
        batches = list(loader)
        found = loader.statistics()
    assert found.bad == 1
    with open(found.quarantine) as file:
        assert '"reason": "caption: ' in file.read()
    if pad:
        assert [int(i) for b in batches for i, v in zip(b[3], b[4], strict=True) if not v] == [5]
    else:
        ids = [int(i) for batch in batches for i in batch[3]]
        assert len(ids) == N
        assert 5 not in ids
        assert all((x == i).all() for b in batches for x, i in zip(b[0], b[3], strict=True))


def test_what_the_document_prints_runs(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with tarfile.open(stored / "pairs.tar") as source, tarfile.open("street.tar", "w") as target:
        for member in source:
            if int(member.name[:3]) % 4 != 3:
                target.addfile(member, source.extractfile(member))
    text = (ROOT / "docs" / "reference" / "batches.md").read_text()
    code, *_ = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    batch = names["batch"]
    assert list(batch) == ["image", "caption", "boxes", "id"]
    assert batch["image"].shape[1:] == (3, 224, 224)
    assert (batch["boxes"].shape[1:], batch["boxes"].dtype) == ((20, 4), torch.float32)
