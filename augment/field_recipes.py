"""Check the recipes of all fields of a sample: its images, and the fields that follow them.

A list of operations acts on every field that it concerns: each image that is selected, and the
masks, boxes and keypoints `of` it. One operation draws the same numbers for all of them: images of
one size get one window. A mapping has a list for each image that is to be changed, and other images
are decoded as they are. The fields of a tuple share a list and its draws; entries draw apart.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.augment.checked_recipes import FieldRecipes, Follower
from penstock.augment.field_operations import Map, Pad, SanitizeBoxes, Unpack
from penstock.augment.operations import (
    Apply,
    AutoAugment,
    CenterCrop,
    Operation,
    RandAugment,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Recipe,
    Resize,
    TrivialAugmentWide,
)
from penstock.augment.recipe import check_recipe, operations_of
from penstock.cache import RecipeError
from penstock.readers import ANY_SIZE
from penstock.readers.fields import (
    Array,
    Boxes,
    Bytes,
    Image,
    Keypoints,
    Mask,
    Tokens,
    is_mask_name,
    untyped_places,
)

if TYPE_CHECKING:
    from penstock.augment.recipe import CheckedRecipe
    from penstock.readers import ImageRange
    from penstock.readers.fields import FieldType

Recipes = Recipe | Mapping[str | tuple[str, ...], Recipe]
"""The type of `augment=`: one list of operations, or a list by field or by a tuple of fields."""
FieldLists = Recipe | Mapping[str, Recipe]
"""Recipes with a list for each field of a tuple, as `by_field` gives them."""

# Operations that move pixels in a way that masks, boxes and points don't follow yet.
_UNFOLLOWED = (RandomRotation, RandAugment, TrivialAugmentWide, AutoAugment)
_FOLLOWING = (Mask, Boxes, Keypoints)
_MOVING = (
    CenterCrop,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    *_UNFOLLOWED,
)

_log = logging.getLogger("penstock")


