"""The random numbers of a batch: how its images are cropped, flipped and mixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.augment.draws import Draws, draw

if TYPE_CHECKING:
    from penstock.augment.mixing import Mix, Mixer
    from penstock.augment.recipe import CheckedRecipe
    from penstock.pipeline.feed.batch import Batch
    from penstock.readers.fields.columns import SampleBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDraws:
    """Draws random numbers for a recipe: pure functions of (seed, epoch, sample id), on any thread.

    recipe: of the images in the field `image`; both None without images. mixer: of MixUp and
    CutMix; None without them.
    """

    recipe: CheckedRecipe | None
    image: str | None
    seed: int
    mixer: Mixer | None

    def draws(self, content: SampleBatch, epoch: int) -> Draws | None:
        """The numbers of each sample of a batch; a substitute has those of its own id."""
        if self.recipe is None or self.image is None:
            return None
        encoded = content.encoded(self.image)
        return draw(self.recipe, ids=encoded.ids, dims=encoded.dims, seed=self.seed, epoch=epoch)

    def mix(self, batch: Batch) -> Mix | None:
        """How each sample is mixed, and with which other; None where none is."""
        slots = batch.slots
        if self.mixer is None or slots.partner is None:
            return None
        # Keyed by the plan's ids: a substitute is mixed as what it stands for.
        return self.mixer(batch.own[: slots.real], slots.partner, epoch=batch.epoch)
