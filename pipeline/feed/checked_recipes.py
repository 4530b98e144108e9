"""Check the recipes of a loader: one, or several that the parts of a mixture have.

`mapped_fields` derives the fields that batches have after the Maps of a recipe, and the recipe that
remains. Batches have one form, so all recipes must deliver the same fields, in the same types and
shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.augment import FieldRecipes
from penstock.cache import ConfigError, RecipeError
from penstock.pipeline.feed.tensors import VALID
from penstock.pipeline.options import checked_augment
from penstock.readers.fieldtypes import base_name, image_fields, stored_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.augment import ArrayCrop, CheckedRecipe, FieldLists, PlacedMap, Recipes
    from penstock.pipeline.options import LoaderOptions
    from penstock.readers import Contents, ImageRange, MixtureContents, Source
    from penstock.readers.fieldtypes import Schema

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedFields:
    """The fields that batches have after the Maps of a recipe.

    schema: of samples after the Maps; it also has fields that aren't selected. fields: of a batch,
    those that Maps add at the end. reads: the dataset's fields that are read for them. maps: in
    order. augment: the recipe without Maps. crops: of arrays, by field; only the cropped parts are
    read. salts: of the draws, by field.
    """

    schema: Schema
    fields: tuple[str, ...]
    reads: tuple[str, ...]
    maps: tuple[PlacedMap, ...] = ()
    augment: FieldLists | None = None
    crops: Mapping[str, ArrayCrop] = field(default_factory=dict)
    salts: Mapping[str, int] = field(default_factory=dict)

    @property
    def encoded_images(self) -> list[str]:
        """The image fields whose encoded bytes a Map's function gets."""
        taken = [name for each in self.maps for name in each.takes]
        return list(image_fields(self.schema, taken))


def mapped_fields(dataset: Source, recipe: Recipes | None) -> MappedFields:
    """Check the Maps of a loader's recipe against its dataset, and return the resulting fields.

    A Map may take fields that aren't selected. Raises RecipeError.
    """
    schema = dataset.schema
    if recipe is None:
        reads = stored_fields(dataset.fields, schema)
        return MappedFields(schema=schema, fields=dataset.fields, reads=reads)
    from penstock.augment import by_field, check_maps, entry_salts, split_maps

    recipes, salts = by_field(recipe), entry_salts(recipe)
    crops: dict[str, ArrayCrop] = {}
    if recipes is None or not any(type.can_crop for type in schema.values()):
        maps, augment = split_maps(recipes)
    else:
        from penstock.augment import check_array_crops, cropped_schema, is_array_crop

        fields = stored_fields(dataset.fields, schema)
        maps, augment = split_maps(recipes, lambda op, of: is_array_crop(op, of, schema, fields))
        crops = check_array_crops(augment, schema, fields, salts)
        schema = cropped_schema(schema, crops)
    placed, schema = check_maps(maps, schema)
    made: dict[str, None] = {}
    read = [*dataset.fields]
    for each in placed:
        read += [name for name in each.takes if base_name(name, schema) not in made]
        made |= dict.fromkeys(each.returns)
    unread = [name for name in made if name in dataset.schema and name not in read]
    if unread:
        raise RecipeError(
            f'A Map returns "{unread[0]}", a field of the dataset that fields={dataset.fields!r} '
            "leaves out. Add it to fields=, or give the returned value another name."
        )
    return MappedFields(
        maps=placed,
        schema=schema,
        fields=(*dataset.fields, *(name for name in made if name not in dataset.fields)),
        reads=stored_fields(read, dataset.schema),
        augment=augment,
        crops=crops,
        salts=salts,
    )


def make_recipes(
    options: LoaderOptions, mapped: MappedFields, ranges: Mapping[str, ImageRange]
) -> FieldRecipes:
    """Check the recipe without its Maps against the fields that batches have. ranges: of the images
    that get the recipe."""
    types = (mapped.schema[name] for name in mapped.fields if name in mapped.schema)
    # Images, and what follows them, are processed even without operations.
    has_images = any(t.is_image or t.refers_to == "image" or t.follows for t in types)
    if mapped.augment is None and not has_images:
        recipes = FieldRecipes(fields=mapped.fields, images={}, followers={}, columns={})
    else:
        from penstock.augment import check_recipes

        recipes = check_recipes(mapped.augment, mapped.schema, mapped.fields, ranges, mapped.salts)
    if options.as_dict and options.pad and VALID in recipes.fields:
        raise ConfigError(
            f'as_dict=True and pad="mask" add "{VALID}" to each batch, and the dataset has a field '
            "of that name. Drop as_dict= and take tuples, or leave the field out of fields=."
        )
    return recipes


class CheckedAugment(NamedTuple):
    """A recipe that was checked against a dataset. mapped: the fields after its Maps. recipes: its
    operations on each of them."""

    mapped: MappedFields
    recipes: FieldRecipes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Augments:
    """The different recipes of a loader, at least one.

    reads: the dataset's fields that are read for them. of_part: the number of each part's recipe,
    int64, shape (parts,). first_ids: the first sample id of each part. Without parts that have
    recipes, both are empty.
    """

    each: tuple[CheckedAugment, ...]
    reads: tuple[str, ...]
    of_part: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    first_ids: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def first(self) -> CheckedAugment:
        """A recipe that shows the form of all batches."""
        return self.each[0]

    def split(self, ids: Ints) -> list[tuple[int, Ints]]:
        """Return the numbers of the recipes of these samples, and the rows of each."""
        part = np.searchsorted(self.first_ids, ids, side="right") - 1
        numbers = self.of_part[part]
        found = np.flatnonzero(np.bincount(numbers, minlength=1)).tolist()
        return [(number, np.flatnonzero(numbers == number)) for number in found]


def checked_augments(dataset: Source, options: LoaderOptions) -> Augments:
    """Return the recipes of a loader: its own, and those of a mixture's parts.

    Raises ConfigError and RecipeError for recipes that don't fit the dataset or one another.
    """
    mixture = dataset.contents.mixture
    if mixture is None or not mixture.augments:
        mapped = mapped_fields(dataset, options.augment)
        one = CheckedAugment(mapped, make_recipes(options, mapped, dataset.contents.images))
        return Augments(each=(one,), reads=mapped.reads)
    recipes, numbers = recipes_of_parts(mixture, options)
    owners = [numbers.index(number) for number in range(len(recipes))]  # one part of each
    each = []
    for number, recipe in enumerate(recipes):
        try:
            mapped = mapped_fields(dataset, recipe)
            ranges = _ranges(dataset, compress(mixture.parts, [n == number for n in numbers]))
            checked = make_recipes(options, mapped, ranges)
        except RecipeError as error:
            owner = mixture.names[owners[number]]
            raise RecipeError(f'The recipe of the part "{owner}": {error}') from error
        if len(recipes) > 1:
            _check_sizes(checked)
        each.append(CheckedAugment(mapped, checked))
        _check_alike(each, [mixture.names[owner] for owner in owners])
    if len(each) > 1 and options.resident is True:
        raise ConfigError(
            "resident=True keeps the decoded images of one recipe in memory, and the parts of this "
            "mixture have several (part_augment). Drop one of the two."
        )
    ids = np.array([part.id_end for part in mixture.parts], np.int64)
    return Augments(
        each=tuple(each),
        reads=tuple(dict.fromkeys(name for one in each for name in one.mapped.reads)),
        of_part=np.array(numbers, np.int64),
        first_ids=np.cumsum(ids) - ids,
    )


def recipes_of_parts(
    mixture: MixtureContents, options: LoaderOptions
) -> tuple[list[Recipes | None], list[int]]:
    """Return the different recipes of a mixture's parts, and the number of each part's recipe."""
    different: list[Any] = []
    numbers = []
    for name in mixture.names:
        recipe = options.augment
        if name in mixture.augments:
            try:
                recipe = checked_augment(mixture.augments[name])
            except ConfigError as error:
                raise type(error)(f'part_augment, of "{name}": {error}') from error
        if recipe not in different:
            different.append(recipe)
        numbers.append(different.index(recipe))
    return different, numbers


def _ranges(dataset: Source, parts: Iterable[Contents]) -> dict[str, Any]:
    """Return the bounds of the sizes of each image field in some parts; of all if those lack
    it."""
    from penstock.readers.formats import join_ranges  # needed by such mixtures only

    found, parts = {}, [*parts]
    for name, whole in dataset.contents.images.items():
        ranges = [part.images[name] for part in parts if name in part.images]
        found[name] = join_ranges(ranges) if ranges else whole
    return found


def _check_alike(each: Sequence[CheckedAugment], owners: Sequence[str]) -> None:
    """Raise RecipeError if the last recipe gives batches of another form than the first. owners: a
    part with each of the recipes."""
    forms = [_form(each[0]), _form(each[-1])]
    for name in dict.fromkeys(name for form in forms for name in form):
        one, other = (form.get(name, "no such field") for form in forms)
        if one != other:
            raise RecipeError(
                f'part_augment: the parts "{owners[0]}" and "{owners[len(each) - 1]}" deliver '
                f'different batches. "{name}": {one}, and {other}. Each batch has samples of '
                "several parts, so give all recipes the same fields, sizes and types."
            )


def _check_sizes(recipes: FieldRecipes) -> None:
    """Raise RecipeError for images whose size depends on all images of a batch."""
    for name, recipe in recipes.images.items():
        if recipe.form == "batch":
            raise RecipeError(
                f'"{name}" has a size for each batch, and part_augment has several recipes, so '
                "that one batch would have several sizes. Pad(to=...) or Letterbox(640) gives all "
                "one size; or leave Pad out, for a list of images."
            )


def _form(augment: CheckedAugment) -> dict[str, Any]:
    """Return what batches have, by field, for comparison and messages."""
    recipes, schema = augment.recipes, augment.mapped.schema
    views = {view.name: view for recipe in recipes.images.values() for view in recipe.views}
    found: dict[str, Any] = {}
    for name in recipes.fields:
        if name in views:
            found[name] = f"{views[name].count} views, {_images(views[name].recipe)}"
            continue
        if (recipe := recipes.images.get(name)) is None:
            found[name] = schema.get(name, "as it is stored")
            if name in recipes.columns:
                found[name] = f"{found[name]}, {recipes.columns[name]}"
            continue
        found[name] = _images(recipe)
        if recipe.form == "list":
            found[name] = f"lists of {recipe.dtype} images, {recipe.decode.channels} channels"
        if recipe.mixing:
            found[name] += f", mixed by {', '.join(map(str, recipe.mixing))}"
    return found


def _images(recipe: CheckedRecipe) -> str:
    channels, height, width = recipe.shape
    return f"{recipe.dtype} images, {height} high, {width} wide, {channels} channels"
