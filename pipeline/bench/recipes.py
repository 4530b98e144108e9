"""Resolve the name of a recipe that `penstock bench` plays.

The names are imagenet, imagenet-eval, auto (imagenet if there are images, else the unchanged
fields), none (read without decoding, to measure reading alone), or module:name of the user's own
recipe or of a function that returns one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.cache import ConfigError, RecipeError

if TYPE_CHECKING:
    from penstock.augment import Recipes

AUTO = "auto"
RECIPES = (AUTO, "imagenet", "imagenet-eval", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRecipe:
    """A recipe that a bench can play, and the Python code for it.

    operations: as for `augment=`; empty for unchanged fields. reads_only: samples are read but not
    decoded. shuffled: True for training. line: the Python expression of the operations. names: the
    names of `penstock` that it uses; imports: further lines of imports.
    """

    name: str
    operations: Recipes
    shuffled: bool
    line: str
    names: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    reads_only: bool = False

    def settled(self, *, has_images: bool) -> NamedRecipe:
        """Return the recipe that "auto" selects for a dataset with or without images; any other
        recipe is returned as it is. Raises RecipeError for one that needs images if there are
        none."""
        if self.name == AUTO:
            return recipe_named("imagenet") if has_images else replace(self, name="fields")
        if self.name.startswith("imagenet") and not has_images:
            raise RecipeError(
                f"--augment {self.name} works on images, but the batches of this dataset have "
                "none. Leave it out, or pass --augment none."
            )
        return self


def recipe_named(name: str) -> NamedRecipe:
    """Return the recipe of that name. Raises ConfigError for an unknown name, RecipeError if a
    user's recipe has no operations."""
    from penstock.augment import imagenet_eval, imagenet_train

    if name == "imagenet":
        return NamedRecipe(
            name=name,
            operations=tuple(imagenet_train(224)),
            shuffled=True,
            line="imagenet_train(224)",
            names=("imagenet_train",),
        )
    if name == "imagenet-eval":
        return NamedRecipe(
            name=name,
            operations=tuple(imagenet_eval()),
            shuffled=False,
            line="imagenet_eval()",
            names=("imagenet_eval",),
        )
    if name == "none":
        return NamedRecipe(name=name, operations=(), shuffled=True, line="", reads_only=True)
    if name == AUTO:
        return NamedRecipe(name=name, operations=(), shuffled=True, line="")
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise ConfigError(
            f"--augment: got {name!r}, wanted {', '.join(RECIPES)}, or module:name of a list of "
            "operations or of a function that returns one, such as mytrain:recipe."
        )
    return _users_recipe(name, module, attribute)


def _users_recipe(name: str, module: str, attribute: str) -> NamedRecipe:
    # The current folder comes first, as for `python -m`: a recipe is often next to the script.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"--augment {name}: {error}. Pass module:name, with a module that can be imported from "
            "this folder and a name in it."
        ) from error
    made = callable(found)
    try:
        operations = found() if made else found
    except Exception as error:
        raise RecipeError(
            f"--augment {name}: a call without arguments raised {type(error).__name__}: {error}. "
            "Name a list of operations, or a function without arguments that returns one."
        ) from error
    if isinstance(operations, str) or not hasattr(operations, "__iter__"):
        raise RecipeError(
            f"--augment {name}: got {operations!r}, wanted a list of operations, such "
            "as imagenet_train(224)."
        )
    return NamedRecipe(
        name=name,
        operations=operations if isinstance(operations, Mapping) else tuple(operations),
        shuffled=True,
        line=attribute + ("()" if made else ""),
        imports=(f"from {module} import {attribute.partition('.')[0]}",),
    )
