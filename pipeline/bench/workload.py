"""What `penstock bench` is asked to measure, as a value, and the loader that does it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.cache.base.blob import READ_MODE
from penstock.cache.base.limits import usable_cores
from penstock.cache.errors import ConfigError, PlanError
from penstock.pipeline.bench.accelerators import accelerator as accelerator_named
from penstock.pipeline.bench.tune import Setup
from penstock.pipeline.plan.world import World
from penstock.readers.fields.selection import image_fields
from penstock.readers.formats.registry import AUTO as ANY_FORMAT
from penstock.readers.formats.sampling import AS_THEY_COME, Sampling
from penstock.readers.origin.urls import show

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from penstock.pipeline.bench.recipes import NamedRecipe
    from penstock.pipeline.loader import DataLoader
    from penstock.readers import Dataset

# ImageNet's usual batch for one accelerator; a smaller dataset gives what it has.
DEFAULT_BATCH = 256
_SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one `penstock bench` measures; its arguments are checked, its dataset isn't open yet.

    seconds: of each measured run. step_s: of the emulated training step over a batch, 0 without
    one; accelerator: whose step that is, "" where its length was given. fields, manifest, format
    and what else a Dataset takes: as there.
    """

    url: str
    recipe: NamedRecipe
    device: str
    seconds: float
    batch_size: int | None = None
    num_workers: int | None = None
    step_s: float = 0.0
    accelerator: str = ""
    cache: Path | None = None
    index: Path | str | None = None
    storage_options: Mapping[str, Any] | None = None
    fields: tuple[str, ...] | Mapping[str, str] | None = None
    manifest: str | None = None
    format: str = ANY_FORMAT
    sampling: Sampling = AS_THEY_COME

    @property
    def place(self) -> str:
        """The URL for people, without what is secret in it."""
        return show(self.url)

    def dataset(self) -> Dataset:
        """The dataset, not open yet; the caller closes it."""
        from penstock.pipeline.bench.whole_samples import WholeSamples
        from penstock.readers import Dataset

        kind = WholeSamples if self.recipe.reads_only else Dataset
        return kind(
            self.url,
            fields=self.fields,
            format=self.format,
            manifest=self.manifest,
            cache=self.cache,
            index=self.index,
            **self.sampling.arguments(),
            storage_options=self.storage_options,
            allow_left_out=1,
        )

    def settled(self, dataset: Dataset) -> Workload:
        """The workload with the recipe that fits the dataset, which is open. Raises RecipeError."""
        images = image_fields(dataset.schema, dataset.fields)
        return replace(self, recipe=self.recipe.settled(has_images=bool(images)))

    def setup(self, dataset: Dataset) -> Setup:
        """What is given, and the loader's own defaults for the rest. Raises PlanError for a batch
        larger than the dataset."""
        samples = len(dataset)
        size = self.batch_size or min(DEFAULT_BATCH, samples)
        if size > samples:
            whose = f" ({self.accelerator}'s)" if self.accelerator else ""
            raise PlanError(
                f"--batch-size: got {size}{whose}, and {self.place} has {samples:,} samples: no "
                f"batch could be filled. Pass --batch-size {samples} or less, or a larger dataset."
            )
        return Setup(
            batch_size=size,
            num_workers=self.num_workers or World(0, 1).threads(usable_cores()),
            prefetch_factor=2 if self.recipe.shuffled else 1,
        )

    def loader(self, dataset: Dataset, setup: Setup) -> DataLoader:
        """The loader of a run, on this process alone."""
        from penstock.pipeline.loader import DataLoader

        return DataLoader(
            dataset,
            batch_size=setup.batch_size,
            shuffle=self.recipe.shuffled,
            num_workers=setup.num_workers,
            drop_last=self.recipe.shuffled,
            prefetch_factor=setup.prefetch_factor,
            seed=_SEED if self.recipe.shuffled else None,
            augment=self.recipe.operations or None,
            device=self.device,
            world=World(0, 1),
            read=setup.read,
        )

    @property
    def imports(self) -> str:
        """What `line` needs, as a user would write it."""
        names = {"DataLoader", "Dataset", *self.recipe.names}
        return "\n".join([f"from penstock import {', '.join(sorted(names))}", *self.recipe.imports])

    def line(self, setup: Setup) -> str:
        """The Python that builds the loader of this setup; what is a default of the loader's is
        left out. None says what a recipe does that only reads."""
        options = [f"batch_size={setup.batch_size}"]
        if self.recipe.shuffled:
            options += ["shuffle=True", "drop_last=True"]
        if setup.num_workers != World(0, 1).threads(usable_cores()):
            options.append(f"num_workers={setup.num_workers}")
        if setup.prefetch_factor != (2 if self.recipe.shuffled else 1):
            options.append(f"prefetch_factor={setup.prefetch_factor}")
        if self.recipe.line:
            options.append(f"augment={self.recipe.line}")
        if self.device != "cpu":
            options.append(f"device={self.device!r}")
        if setup.read != READ_MODE:
            options.append(f"read={setup.read!r}")
        parts = [repr(self.place)]
        if self.fields is not None:
            parts.append(f"fields={self.fields!r}")
        if self.manifest is not None:
            parts.append(f"manifest={self.manifest!r}")
        if self.format != ANY_FORMAT:
            parts.append(f"format={self.format!r}")
        parts += [f"{name}={value!r}" for name, value in self.sampling.arguments().items() if value]
        if self.index is not None:
            parts.append(f"index={str(self.index)!r}")
        if self.cache is not None:
            parts.append(f"cache={str(self.cache)!r}")
        if self.storage_options:  # they may hold a secret
            parts.append("storage_options=storage_options")
        return f"DataLoader(Dataset({', '.join(parts)}), {', '.join(options)})"


def step_of(
    *, step_ms: float | None, accelerator: str | None, batch_size: int | None
) -> tuple[float, int | None]:
    """Seconds of a training step, and the batch that it is over (None: whatever is chosen).

    Raises ConfigError where both are given, or a name or number that can't be.
    """
    if step_ms is not None and accelerator is not None:
        raise ConfigError(
            f"Got --step-ms {step_ms:g} and --accelerator {accelerator}: both say how long a step "
            "is. Pass one of them."
        )
    if accelerator is not None:
        known = accelerator_named(accelerator)
        size = batch_size or known.batch_size
        return known.step_for(size), size
    return (step_ms or 0.0) / 1000, batch_size
