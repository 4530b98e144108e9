"""Operations of another package: the examples of docs/howto/operations.md, as printed there."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Boxes, DataLoader, Image, Keypoints, Mask
from penstock.augment import (
    AutoAugment,
    Graph,
    GraphPlan,
    ImageOperation,
    RandomAffine,
    RandomHorizontalFlip,
    RandomPerspective,
    RandomPosterize,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    check_recipe,
    check_recipes,
    draw,
)
from penstock.cache import RecipeError
from penstock.readers import ImageRange
from penstock.testing import OperationConformance
from tests import warm
from tests.layers import ROOT
from tests.pipeline.feed.memory import Memory

SIZES = {"image": ImageRange(min_height=32, max_height=32, min_width=32, max_width=32)}
SELECTED = ("image", "mask"), SIZES
TEXT = (ROOT / "docs/howto/operations.md").read_text()
EXAMPLES = re.findall(r"```python\n(from dataclasses.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module of the examples, imported from a file."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "my_operations.py").write_text("\n".join(EXAMPLES))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        import my_operations  # type: ignore[import-not-found]

        yield my_operations
    sys.modules.pop("my_operations")


class TestDropBits(OperationConformance):
    @pytest.fixture(autouse=True)
    def _module(self, examples: Any) -> None:
        self.examples = examples

    def make(self) -> ImageOperation:
        return self.examples.DropBits()  # type: ignore[no-any-return]


class TestShear(OperationConformance):
    @pytest.fixture(autouse=True)
    def _module(self, examples: Any) -> None:
        self.examples = examples

    def make(self) -> ImageOperation:
        return self.examples.Shear(0.4)  # type: ignore[no-any-return]


def own(op: ImageOperation) -> type:
    return type(f"Test{type(op).__name__}", (OperationConformance,), {"make": lambda _: op})


TestPosterize = own(RandomPosterize(2))
TestRotation = own(RandomRotation(40))
TestAffine = own(RandomAffine(20, (0.1, 0.1)))
TestPerspective = own(RandomPerspective())
TestPolicy = own(AutoAugment())


def test_masks_boxes_and_points_follow_it_through_a_loader(examples: Any) -> None:
    side, count = 32, 16
    square = np.zeros((side, side), np.uint8)
    square[10:20, 8:22] = 255
    columns = {
        "image": [np.stack([square] * 3, axis=-1)] * count,
        "mask": [square] * count,
        "boxes": [np.array([[8, 10, 22, 20]], np.float32)] * count,
        "points": [np.array([[15, 15]], np.float32)] * count,
    }
    types: dict[str, Any] = {"image": Image(), "mask": Mask(of="image", dtype="uint8")}
    types |= {"boxes": Boxes(of="image"), "points": Keypoints(of="image")}
    recipe = [RandomHorizontalFlip(), examples.Shear(0.5), RandomVerticalFlip()]
    source = Memory(types, columns, fields=tuple(types))
    moved = 0
    with DataLoader(source, batch_size=4, seed=2, augment=recipe) as loader:
        for images, masks, boxes, points in loader:
            for row, image in enumerate(images[:, 0].numpy()):
                assert ((image > 127) == (masks[row].numpy() == 255)).mean() > 0.98
                rows, places = np.nonzero(image > 127)
                around = [places.min(), rows.min(), places.max() + 1, rows.max() + 1]
                np.testing.assert_allclose(boxes[row][0].numpy(), around, atol=1.5)
                x, y = points[row][0].round().int().tolist()
                assert image[y, x] == 255
                moved += around[2] - around[0] > 16
    assert moved > count / 4


def test_one_without_geometry_is_refused_beside_masks(examples: Any) -> None:
    class Still(examples.Shear):  # type: ignore[misc]
        moves = True
        geometry = ImageOperation.geometry

    schema = {"image": Image(), "mask": Mask(of="image")}
    with pytest.raises(RecipeError, match=r"Still.*can't follow it"):
        check_recipes([Still()], schema, *SELECTED)


def test_a_node_that_fails_is_named_before_samples_are_blamed(examples: Any) -> None:
    class Halved(examples.Shear):  # type: ignore[misc]
        def node(self, images: Any, _inputs: Any, _shape: Any) -> Any:
            return images[:, 0:4]

    recipe = check_recipe([Halved()], images=SIZES["image"])
    with pytest.raises(RecipeError, match=r"Halved.*returned \(32, 4, 3\).*wanted the same shape"):
        Graph(GraphPlan(recipe, batch_size=2, threads=1))


def test_a_spawned_process_draws_the_same(examples: Any) -> None:
    recipe = [Resize((24, 24)), examples.DropBits(), examples.Shear()]
    code = (
        "import pickle, sys\n"
        f"sys.path[:0] = [{str(Path(examples.__file__).parent)!r}, {str(ROOT)!r}]\n"
        "from tests.augment.test_plugins import values_of\n"
        f"recipe = pickle.loads({pickle.dumps(recipe)!r})\n"
        "print(pickle.dumps(values_of(recipe)).hex())\n"
    )
    done = warm.run(["-c", code])
    here = values_of(recipe)
    there = pickle.loads(bytes.fromhex(done.stdout))
    assert here.keys() == there.keys()
    for name, values in there.items():
        np.testing.assert_array_equal(values, here[name])


def values_of(recipe: Any) -> dict[str, Any]:
    checked = check_recipe(recipe, images=SIZES["image"])
    return draw(checked, ids=np.arange(5), dims=np.full((5, 2), 32, np.int32), seed=4, epoch=1)
