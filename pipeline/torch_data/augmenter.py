"""Decode and augment the images of a torch dataset with DALI, in the loader's process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment import Graph, GraphPlan, check_recipe, draw
from penstock.cache import ConfigError, watch
from penstock.cache.base import usable_cores
from penstock.readers import ANY_SIZE, EncodedBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.torch_data.image_split import SplitBatch


class Augmenter:
    """Decodes and augments the images of batches with DALI, several batches in flight.

    For one thread; close() is idempotent. Raises ConfigError for batches of varying size,
    RecipeError for operations that don't fit.
    """

    def __init__(self, options: LoaderOptions, *, seed: int) -> None:
        operations = options.augment
        assert not isinstance(operations, Mapping)
        if options.is_batched and options.rank_batch is None:
            raise ConfigError(
                "augment= needs batches of one size. Pass batch_size=, and sampler= instead of a "
                "batch_sampler."
            )
        self.recipe = check_recipe(tuple(operations or ()), images=ANY_SIZE)
        if self.recipe.mixing:
            raise ConfigError(
                "MixUp and CutMix work on native datasets, but this is a torch dataset. Mix the "
                "batch in your training step, or read the files with penstock.Dataset."
            )
        if once := [op for op in self.recipe.ops if getattr(op, "per", "sample") == "batch"]:
            raise ConfigError(
                f'{once[0]}: per="batch" works on native datasets, but this is a torch dataset, '
                "whose batches have no place in a global order. Leave per= out, or read the files "
                "with penstock.Dataset."
            )
        self.seed = seed
        self.threads = options.world.threads(usable_cores())
        self._options = options
        self._graph: Graph | None = None
        self._graph_is_for: tuple[bool, int] | None = None  # decoded images, images per sample
        watch(self)

    def disown(self) -> None:
        """Leave the graph to the parent, in a forked child; the next batch gets a new one."""
        self._graph = None

    def feed(
        self,
        split: SplitBatch,
        *,
        ids: NDArray[np.int64],
        epoch: int | NDArray[np.int64],
        occurrences: NDArray[np.int64] | None = None,
    ) -> None:
        """Start decoding a batch. ids: int64, shape (n,). epoch, occurrences: as in `draw_base`."""
        pixels = bool(split.arrays) and split.arrays[0].ndim == 3
        if self._graph is None or self._graph_is_for != (pixels, split.images):
            self.close()
            options = self._options
            plan = GraphPlan(
                self.recipe,
                batch_size=(options.rank_batch or 1) * split.images,
                threads=self.threads,
                device_id=options.device.index,
                deterministic=options.deterministic,
                pixels=pixels,
                check_headers=not pixels,
            )
            self._graph = Graph(plan)
            self._graph_is_for = pixels, split.images
        if split.images > 1:  # all images of a sample share its draws
            ids = np.tile(ids, split.images)
            occurrences = None if occurrences is None else np.tile(occurrences, split.images)
            epoch = epoch if isinstance(epoch, int) else np.tile(epoch, split.images)
        dims, seed = split.dims, self.seed
        draws = draw(
            self.recipe, ids=ids, dims=dims, seed=seed, epoch=epoch, occurrences=occurrences
        )
        batch = EncodedBatch(ids=ids, encoded=split.arrays, dims=dims)
        self._graph.feed(batch, draws)

    def outputs(self, split: SplitBatch) -> Any:
        """Return the oldest batch in flight with its images. Raises CorruptSampleError."""
        assert self._graph is not None
        return split.joined(self._graph.outputs())

    def drain(self) -> None:
        """Drop the batches in flight."""
        if self._graph is not None:
            self._graph.drain()

    def close(self) -> None:
        """Release DALI's threads and memory."""
        if self._graph is not None:
            self._graph.close()
            self._graph = None
