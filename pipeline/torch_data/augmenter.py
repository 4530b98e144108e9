"""Decode and augment the images of a torch dataset by DALI, in the loader's process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment import Graph, check_recipe, draw
from penstock.cache import ConfigError, watch
from penstock.cache.base import usable_cores
from penstock.readers import ANY_SIZE, EncodedBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from penstock.augment import Operation
    from penstock.pipeline.options import TorchDataOptions
    from penstock.pipeline.torch_data.image_split import SplitBatch

# A torch dataset doesn't say how large its images are.


class Augmenter:
    """Decodes and augments the images of batches by DALI, several batches in flight.

    For one thread; close() is idempotent. seed: of the draws, keyed further by epoch and sample id.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        *,
        batch_size: int,
        threads: int,
        device: torch.device,
        deterministic: bool,
        seed: int,
    ) -> None:
        self.recipe = check_recipe(tuple(operations), images=ANY_SIZE)
        if self.recipe.mixing:
            raise ConfigError(
                "MixUp and CutMix work on native datasets: on a torch dataset, mix the batch in "
                "your training step, or point penstock.Dataset at the files."
            )
        self.seed = seed
        self.threads = threads
        self._options = {
            "batch_size": batch_size,
            "threads": threads,
            "device": device.type,
            "device_id": device.index,
            "deterministic": deterministic,
        }
        self._graph: Graph | None = None
        self._fits: tuple[bool, int] | None = None  # what the graph was made for
        watch(self)

    def disown(self) -> None:
        """Leave the graph to the parent, in a forked child; the next batch gets a new one."""
        self._graph = None

    def feed(
        self,
        split: SplitBatch,
        *,
        ids: NDArray[np.int64],
        epoch: int,
        occurrences: NDArray[np.int64] | None = None,
    ) -> None:
        """Start decoding a batch. ids: int64, shape (n,). occurrences: as in `draw_base`."""
        pixels = bool(split.arrays) and split.arrays[0].ndim == 3
        if self._graph is None or self._fits != (pixels, split.images):
            self.close()
            options: dict[str, Any] = dict(self._options)
            options["batch_size"] *= split.images
            self._graph = Graph(self.recipe, pixels=pixels, check_headers=not pixels, **options)
            self._fits = pixels, split.images
        if split.images > 1:  # all images of a sample share its draws
            ids = np.tile(ids, split.images)
            occurrences = None if occurrences is None else np.tile(occurrences, split.images)
        draws = draw(
            self.recipe,
            ids=ids,
            dims=split.dims,
            seed=self.seed,
            epoch=epoch,
            occurrences=occurrences,
        )
        batch = EncodedBatch(ids=ids, encoded=split.arrays, dims=split.dims)
        self._graph.feed(batch, draws)

    def outputs(self, split: SplitBatch) -> Any:
        """The oldest batch that was fed, put together again. Raises CorruptSampleError."""
        assert self._graph is not None
        return split.joined(self._graph.outputs())

    def drain(self) -> None:
        """Drop what is in flight."""
        if self._graph is not None:
            self._graph.drain()

    def close(self) -> None:
        """Release DALI's threads and memory."""
        if self._graph is not None:
            self._graph.close()
            self._graph = None


def make_augmenter(options: TorchDataOptions) -> Augmenter:
    """The augmenter of a loader that was given operations and a seed for their draws.

    Raises ConfigError for batches of no fixed size, RecipeError for operations that don't fit.
    """
    operations = options.own.augment
    assert options.draw_seed is not None
    assert not isinstance(operations, Mapping)
    if options.is_batched and options.batch_size is None:
        raise ConfigError(
            "augment= needs batches of one size: pass batch_size=, and sampler= in place of a "
            "batch_sampler."
        )
    return Augmenter(
        operations or (),
        batch_size=options.batch_size or 1,
        threads=options.world.threads(usable_cores()),
        device=options.device,
        deterministic=options.own.deterministic,
        seed=options.draw_seed,
    )
