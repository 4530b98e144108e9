"""Describe the workload of one `penstock bench`, and build its dataset and its loader.

`WholeSamples` is the dataset of the recipe "none": it reads and checks samples without decoding
them, to measure reading alone. The names of recipes are imagenet, imagenet-eval, auto (imagenet if
there are images, else the unchanged fields), none, or module:name of the user's own recipe or of a
function that returns one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from penstock.cache import ConfigError, PlanError, RecipeError
from penstock.cache.base import READ_MODE, ReadMode, usable_cores
from penstock.pipeline.bench.accelerators import accelerator as accelerator_named
from penstock.pipeline.plan import World
from penstock.readers import Run, View, is_mixture_file, open_source
from penstock.readers.fieldtypes import ID, SampleBatch, image_fields
from penstock.readers.formats import AUTO as ANY_FORMAT
from penstock.readers.origin import show

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.augment import Recipes
    from penstock.pipeline.loader import DataLoader
    from penstock.readers import Contents, ReadOptions, RemoteShards, Source

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
    shuffled: bool = True
    line: str = ""
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
        line, names = "imagenet_train(224)", ("imagenet_train",)
        return NamedRecipe(name=name, operations=imagenet_train(224), line=line, names=names)
    if name == "imagenet-eval":
        line, names, made = "imagenet_eval()", ("imagenet_eval",), imagenet_eval()
        return NamedRecipe(name=name, operations=made, line=line, names=names, shuffled=False)
    if name in ("none", AUTO):
        return NamedRecipe(name=name, operations=(), reads_only=name == "none")
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
        line=attribute + ("()" if made else ""),
        imports=(f"from {module} import {attribute.partition('.')[0]}",),
    )


class WholeSamples(View):
    """A source that reads and checks the fields of another one, but delivers only ids. Its
    `close()` closes that source."""

    def __init__(self, source: Source) -> None:
        self.url, self.is_one_url, self.bases = source.url, source.is_one_url, (source,)
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    @property
    def contents(self) -> Contents:
        """The contents of the source."""
        return self._source.contents

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a batch."""
        return (ID,)

    @property
    def remote_shards(self) -> RemoteShards | None:
        """The shards that are read from a remote store."""
        return self._source.remote_shards

    def _runs(self, rows: NDArray[np.int64]) -> Iterable[Run]:
        return (Run(self._source, rows, slice(None)),)

    def _rows(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._source.rows(ids)

    def read(self, rows: NDArray[np.int64], **options: Unpack[ReadOptions]) -> SampleBatch:
        """Read rows as the source does; without fields= the columns are dropped."""
        batch = self._source.read(rows, **options)
        is_whole = options.get("fields") is None
        return replace(batch, columns={}, present={}) if is_whole else batch

    def close(self) -> None:
        """Close the source."""
        self._source.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """The settings of a native loader that its speed depends on, by the loader's names.

    num_workers: decode threads. prefetch_factor: batches in decoding at a time.
    """

    batch_size: int
    num_workers: int
    prefetch_factor: int = 2
    read: ReadMode = READ_MODE


# ImageNet's usual batch on one accelerator; a smaller dataset is one batch.
DEFAULT_BATCH = 256
_SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The workload of one `penstock bench`, with checked arguments and a dataset that isn't open.

    seconds: of each measured run. step_s: of the emulated training step, 0 without one;
    accelerator: the accelerator of the step, "" if the user gave its length. data: arguments of
    `Dataset`.
    """

    url: str
    recipe: NamedRecipe
    device: str
    seconds: float
    batch_size: int | None = None
    num_workers: int | None = None
    step_s: float = 0.0
    accelerator: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The URL without its secrets, for messages."""
        return show(self.url)

    def dataset(self) -> Source:
        """Return the dataset, or the mixture of a mixture file; the caller closes it."""
        source = open_source(self.url, **self.data, allow_left_out=1)
        return WholeSamples(source) if self.recipe.reads_only else source

    def settled(self, dataset: Source) -> Workload:
        """Return the workload with the recipe for this open dataset. Raises RecipeError."""
        images = image_fields(dataset.schema, dataset.fields)
        return replace(self, recipe=self.recipe.settled(has_images=bool(images)))

    def setup(self, dataset: Source) -> LoaderSettings:
        """Return the given settings, with the loader's defaults for the rest. Raises PlanError for
        a batch larger than the dataset."""
        samples = len(dataset)
        size = self.batch_size or min(DEFAULT_BATCH, samples)
        if size > samples:
            whose = f" ({self.accelerator}'s)" if self.accelerator else ""
            raise PlanError(
                f"--batch-size: got {size}{whose}, but {self.place} has only {samples:,} samples. "
                f"Pass --batch-size {samples} or less, or a larger dataset."
            )
        return LoaderSettings(
            batch_size=size,
            num_workers=self.num_workers or World(0, 1).threads(usable_cores()),
            prefetch_factor=2 if self.recipe.shuffled else 1,
        )

    def loader(self, dataset: Source, setup: LoaderSettings) -> DataLoader:
        """Build the loader of a run, with a world of this process alone."""
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
        """The imports of `line`, as a user would write them."""
        is_mixture = is_mixture_file(self.url)
        names = {"DataLoader", "mix_file" if is_mixture else "Dataset", *self.recipe.names}
        names |= {type(each).__name__ for each in (self.data.get("schema") or {}).values()}
        return "\n".join([f"from penstock import {', '.join(sorted(names))}", *self.recipe.imports])

    def line(self, setup: LoaderSettings) -> str:
        """Return the Python expression of the loader of this setup, without arguments that have
        their default. A recipe that only reads has no equivalent."""
        options = [f"batch_size={setup.batch_size}"]
        if self.recipe.shuffled:
            options += ["shuffle=True", "drop_last=True"]
        for name, value, default in (
            ("num_workers", setup.num_workers, World(0, 1).threads(usable_cores())),
            ("prefetch_factor", setup.prefetch_factor, 2 if self.recipe.shuffled else 1),
            ("device", self.device, "cpu"),
            ("read", setup.read, READ_MODE),
        ):
            if value != default:
                options.append(f"{name}={value!r}")
        if self.recipe.line:
            options.append(f"augment={self.recipe.line}")
        parts = [repr(self.place)]
        for name, value in self.data.items():
            if name == "storage_options" and value:  # they may contain a secret
                parts.append("storage_options=storage_options")
            elif value and (name, value) != ("format", ANY_FORMAT):
                parts.append(f"{name}={str(value) if isinstance(value, PathLike) else value!r}")
        kind = "mix_file" if is_mixture_file(self.url) else "Dataset"
        return f"DataLoader({kind}({', '.join(parts)}), {', '.join(options)})"


def step_of(
    *, step_ms: float | None, accelerator: str | None, batch_size: int | None
) -> tuple[float, int | None]:
    """Return the seconds of a training step and its batch size (None: any).

    Raises ConfigError if both a length and an accelerator are given, or one of them is invalid.
    """
    if step_ms is not None and accelerator is not None:
        raise ConfigError(
            f"Got both --step-ms {step_ms:g} and --accelerator {accelerator}, which each set the "
            "length of a step. Pass only one of them."
        )
    if accelerator is not None:
        known = accelerator_named(accelerator)
        size = batch_size or known.batch_size
        return known.step_for(size), size
    return (step_ms or 0.0) / 1000, batch_size
