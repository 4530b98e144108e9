"""The random numbers of a batch: how images are cropped, flipped and mixed, and what follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment.draws import Draws, draw, draw_with_moves
from penstock.readers.fields.columns import ListColumn
from penstock.readers.fields.field_types import Boxes, Mask

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.augment.field_recipes import FieldRecipes
    from penstock.augment.mixing import Mix, Mixer
    from penstock.augment.moves import Moves
    from penstock.pipeline.feed.batch import Batch
    from penstock.readers.fields.boxes import BoxUnits
    from penstock.readers.fields.columns import SampleBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDraws:
    """Draws random numbers for recipes: pure functions of (seed, epoch, sample id), on any thread.

    mixer: of MixUp and CutMix; None without them. units: compares the boxes with their formats.
    """

    recipes: FieldRecipes
    seed: int
    mixer: Mixer | None
    units: BoxUnits

    def draw(self, content: SampleBatch, epoch: int) -> tuple[dict[str, Draws], SampleBatch]:
        """The numbers of each sample of a batch, by image field; a substitute has those of its own
        id. And the batch with masks, boxes and points where their pixels will be."""
        recipes, found = self.recipes, dict[str, Draws]()
        moves: dict[str, Moves] = {}
        for field, recipe in recipes.images.items():
            arguments: dict[str, Any] = {
                "ids": content.ids,
                "dims": _dims(content, field),
                "seed": self.seed,
                "epoch": epoch,
            }
            if field in recipes.followed:
                found[field], moves[field] = draw_with_moves(recipe, **arguments)
            else:
                found[field] = draw(recipe, **arguments)
        if not recipes.followers:
            return found, content
        from penstock.augment.followers import follow

        columns: dict[str, Any] = {name: content.columns[name] for name in recipes.followers}
        dtypes: dict[str, str] = {}
        for name, follower in recipes.followers.items():
            column = columns[name]
            if isinstance(column, ListColumn):
                columns[name] = column.samples
            if isinstance(follower.type, Boxes):
                self.units.see(name, follower.type, column.values)
            if isinstance(follower.type, Mask) and follower.type.is_settled:
                dtypes[name] = follower.type.dtype
        return found, content.with_columns(follow(recipes, moves, columns, dtypes=dtypes))

    def mix(self, batch: Batch) -> Mix | None:
        """How each sample is mixed, and with which other; None where none is."""
        slots = batch.slots
        if self.mixer is None or slots.partner is None:
            return None
        # Keyed by the plan's ids: a substitute is mixed as what it stands for.
        return self.mixer(batch.own[: slots.real], slots.partner, epoch=batch.epoch)


def _dims(content: SampleBatch, field: str) -> NDArray[np.int32]:
    """Heights and widths to draw windows in; of an image that is missing any will do."""
    dims = content.encoded(field).dims
    return np.maximum(dims, 1) if field in content.present else dims
