"""What the Maps of a recipe make of a dataset's fields, and what is left of the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.augment.map import CheckedMaps, check_maps, split_maps
from penstock.cache.errors import RecipeError
from penstock.readers.fields.field_types import ID, Image
from penstock.readers.fields.selection import base_name

if TYPE_CHECKING:
    from penstock.augment.field_recipes import Recipes
    from penstock.pipeline.options.native_options import NativeOptions
    from penstock.readers.fields.schema import Schema
    from penstock.readers.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedFields:
    """The fields that batches have behind the Maps of a recipe.

    maps: in order; none where the recipe has none. fields: of a batch, those that Maps add last.
    augment: the recipe without Maps.
    """

    maps: CheckedMaps
    fields: tuple[str, ...]
    augment: Recipes | None

    @property
    def schema(self) -> Schema:
        """Of samples behind the Maps; it has fields that nobody has selected too."""
        return self.maps.schema

    @property
    def encoded_images(self) -> list[str]:
        """The image fields whose bytes a function gets."""
        taken = [name for each in self.maps.maps for name in each.takes]
        return [name for name in taken if isinstance(self.schema.get(name), Image)]


def mapped_fields(dataset: Source, options: NativeOptions) -> MappedFields:
    """Check the Maps of a loader's recipe against its dataset. Raises RecipeError."""
    maps, augment = split_maps(options.augment)
    before = dataset.schema
    checked = check_maps(maps, before)
    there = {*map(base_name, dataset.fields), ID}
    for each in checked.maps:
        for field in each.takes:
            if base_name(field) not in there:
                raise RecipeError(
                    f'{each.op.name} wants the field "{field}", and fields={dataset.fields!r} of '
                    "the dataset leaves it out. Add it to fields=."
                )
        there.update(each.returns)
    made = {name for each in checked.maps for name in each.returns}
    added = [name for name in checked.schema if name in made and name not in dataset.fields]
    return MappedFields(maps=checked, fields=(*dataset.fields, *added), augment=augment)
