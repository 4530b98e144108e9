"""Hold what the checked recipes do to each field of a sample.

A job without images loads these values and none of the code that checks recipes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.augment.field_operations import Pad, SanitizeBoxes, Unpack
    from penstock.augment.recipe import CheckedRecipe
    from penstock.readers.fields import Array, Boxes, Keypoints, Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """A field that is handed out as its image's recipe leaves it. Made by `check_recipes` only.

    type: of the field. of: its image. moves: whether it follows; else the image isn't selected, and
    the field is handed out as it is. sanitize: what drops boxes, of Boxes and of arrays `of` them.
    boxes: the boxes that an Array has a row for each of. shape: (height, width) of a mask,
    or of the image that isn't selected, which normalised boxes are shares of.
    """

    type: Mask | Boxes | Keypoints | Array
    of: str
    moves: bool
    sanitize: SanitizeBoxes | None = None
    boxes: str | None = None
    shape: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRecipes:
    """The checked operations on each selected field. Made by `check_recipes` only.

    fields: the names of a batch's values, in order. images: the recipe of each image field.
    followers: masks, boxes, keypoints, and arrays that lose rows with boxes. pads: by the
    field that they make dense, or ragged. A field in none of them is handed out as it is.
    """

    fields: tuple[str, ...]
    images: Mapping[str, CheckedRecipe]
    followers: Mapping[str, Follower]
    pads: Mapping[str, Pad | Unpack]

    @property
    def followed(self) -> frozenset[str]:
        """The images that something follows: these need `draws.draw_with_moves`."""
        return frozenset(each.of for each in self.followers.values() if each.moves)

    @property
    def mixed(self) -> str | None:
        """The name of the image field whose samples are mixed with one another."""
        return next((name for name, recipe in self.images.items() if recipe.mixing), None)
