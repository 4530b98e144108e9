"""Datasets for resident images: images of one size, and damaged ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from penstock.readers import Dataset
from tests.conftest import photograph
from tests.images import jpeg

if TYPE_CHECKING:
    from pathlib import Path

from tests.pipeline.feed.resident.resident_loaders import credulous, encoded


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
        patch.setattr("penstock.readers.fieldtypes.verification.check_jpeg", lambda *_: None)
        Dataset(str(root)).open(verify=credulous)
    return root
