"""Define the checked operations on each field of a sample.

A job without images loads these classes and none of the code that checks recipes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.augment.field_operations import ColumnOperation, SanitizeBoxes
    from penstock.augment.recipe import CheckedRecipe
    from penstock.readers.fieldtypes import FieldType


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """A field that follows the moves of its image. Only `check_recipes` creates it.

    type: type of the field. of: its image. moves: True if it follows; False: the image isn't
    selected, and the field is delivered as stored. sanitize: the operation that drops boxes, for
    Boxes and for arrays `of` them. boxes: for an Array, the field of boxes for each of which it has
    a row. shape: (height, width) of the image if its size is known.
    """

    type: FieldType
    of: str
    moves: bool
    sanitize: SanitizeBoxes | None = None
    boxes: str | None = None
    shape: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRecipes:
    """The checked operations on each selected field. Only `check_recipes` creates it.

    fields: names of a batch's values, in order. images: recipe of each image field. followers:
    masks, boxes, keypoints, and arrays that lose rows with boxes. columns: operations on the
    form of a field's column, by field. A field in none of these is delivered as stored.
    """

    fields: tuple[str, ...]
    images: Mapping[str, CheckedRecipe]
    followers: Mapping[str, Follower]
    columns: Mapping[str, ColumnOperation]

    @property
    def followed(self) -> frozenset[str]:
        """The images that have followers, which need `draws.draw_with_moves`."""
        return frozenset(each.of for each in self.followers.values() if each.moves)

    @property
    def mixed(self) -> str | None:
        """The name of the image field whose samples are mixed with one another."""
        return next((name for name, recipe in self.images.items() if recipe.mixing), None)
