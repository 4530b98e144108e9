"""Derive the fields that batches have after the Maps of a recipe, and the recipe that remains.

This is separate from `map_calls`, so that a job without a `Map` doesn't load that module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.augment import FieldRecipes
from penstock.cache import ConfigError, RecipeError
from penstock.pipeline.feed.tensors import VALID
from penstock.readers.fieldtypes import base_name, image_fields, stored_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.augment import ArrayCrop, FieldLists, PlacedMap, Recipes
    from penstock.pipeline.options import LoaderOptions
    from penstock.readers import ImageRange, Source
    from penstock.readers.fieldtypes import Schema


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
    dataset: Source,
    options: LoaderOptions,
    mapped: MappedFields,
    ranges: Mapping[str, ImageRange] | None = None,
) -> FieldRecipes:
    """Check the recipe without its Maps against the fields that batches have. ranges: of the images
    that get the recipe; None for all of the dataset."""
    types = (mapped.schema[name] for name in mapped.fields if name in mapped.schema)
    # Images, and what follows them, are processed even without operations.
    has_images = any(t.is_image or t.refers_to == "image" or t.follows for t in types)
    if mapped.augment is None and not has_images:
        recipes = FieldRecipes(fields=mapped.fields, images={}, followers={}, columns={})
    else:
        from penstock.augment import check_recipes

        images = dataset.contents.images if ranges is None else ranges
        recipes = check_recipes(mapped.augment, mapped.schema, mapped.fields, images, mapped.salts)
    if options.as_dict and options.pad and VALID in recipes.fields:
        raise ConfigError(
            f'as_dict=True and pad="mask" add "{VALID}" to each batch, and the dataset has a field '
            "of that name. Drop as_dict= and take tuples, or leave the field out of fields=."
        )
    return recipes
