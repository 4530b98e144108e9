"""The recipes that `penstock bench` plays, by name.

A recipe is named by imagenet, imagenet-eval, none (encoded bytes, nothing is decoded: what reading
alone can do), or module:name of a user's own list of operations or function that makes one.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import ConfigError, RecipeError

if TYPE_CHECKING:
    from penstock.augment import Operation

RECIPES = ("imagenet", "imagenet-eval", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRecipe:
    """A recipe that a bench can play, and the Python that says the same.

    operations: None hands out encoded samples' ids only. shuffled: as for training. line: the
    Python that makes the operations. names: of `penstock` that it needs; imports: further lines."""

    name: str
    operations: tuple[Operation, ...] | None
    shuffled: bool
    line: str
    names: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()


def recipe_named(name: str) -> NamedRecipe:
    """The recipe of that name. Raises ConfigError for a name that isn't one, RecipeError for a
    user's recipe that holds no operations."""
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
        return NamedRecipe(name=name, operations=None, shuffled=True, line="")
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise ConfigError(
            f"--augment: got {name!r}, wanted {', '.join(RECIPES)}, or module:name of a list of "
            "operations or of a function that makes one, such as mytrain:recipe."
        )
    return _users_recipe(name, module, attribute)


def _users_recipe(name: str, module: str, attribute: str) -> NamedRecipe:
    # As `python -m` does: a recipe lies beside the training script.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"--augment {name}: {error}. Name a module that can be imported from this folder, and "
            "what it holds, as module:name."
        ) from error
    made = callable(found)
    operations = found() if made else found
    if isinstance(operations, str) or not hasattr(operations, "__iter__"):
        raise RecipeError(
            f"--augment {name}: got {operations!r}, wanted a list of operations, such "
            "as imagenet_train(224)."
        )
    return NamedRecipe(
        name=name,
        operations=tuple(operations),
        shuffled=True,
        line=attribute + ("()" if made else ""),
        imports=(f"from {module} import {attribute.partition('.')[0]}",),
    )
