"""Check a loader's torch dataset and the arguments that go with it, and resolve them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.utils.data

from penstock.cache import ConfigError, DatasetError
from penstock.cache.base import READ_MODE
from penstock.pipeline.options import WorkerOptions, batch_sizes, check_ends, shuffle_settings
from penstock.pipeline.torch_data.occurrences import shards_by_rank
from penstock.readers import Source

if TYPE_CHECKING:
    from penstock.pipeline.loader_arguments import LoaderArguments
    from penstock.pipeline.options import LoaderSeed, PenstockOptions, TorchOptions
    from penstock.pipeline.plan import World

_CHECKED_ELEMENTS = 64  # of a list or dict
_WRAPPERS_OF_SEVERAL = (
    torch.utils.data.ConcatDataset,
    torch.utils.data.ChainDataset,
    torch.utils.data.StackDataset,
)
_PART_REMEDY = (
    "pass dataset.subset(ids), or a part of dataset.split(0.9, 0.1, seed=0), to the DataLoader"
)
_SEVERAL_REMEDY = (
    "pass penstock.concat([a, b]) to one DataLoader to read them end to end, or make one "
    "DataLoader per dataset"
)


def check_dataset(dataset: Any) -> None:
    """Raise ConfigError if this isn't a dataset, DatasetError if it holds a native one.

    Torch datasets pass, and objects with samples by index, as with torch.
    """
    if isinstance(dataset, str | bytes | os.PathLike):
        shown = os.fsdecode(dataset)
        raise ConfigError(
            f"dataset: got the path {shown!r}, wanted a dataset. Pass "
            f"DataLoader(Dataset({shown!r}), ...), with penstock's Dataset."
        )
    if isinstance(dataset, type):
        raise ConfigError(
            f"dataset: got the class {dataset.__name__}, wanted an instance of it. Pass "
            f"{dataset.__name__}(...)."
        )
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise ConfigError(
            f"dataset: got a {type(dataset).__name__}, wanted the dataset that it reads. Pass its "
            ".dataset."
        )
    if any(_is_native(part) for part in _inner_datasets(dataset)):
        name = type(dataset).__name__
        remedy = _PART_REMEDY if isinstance(dataset, torch.utils.data.Subset) else _SEVERAL_REMEDY
        raise DatasetError(
            f"{name} holds a native dataset (penstock.Dataset), which is read by shards and not by "
            f"index, so torch's wrappers and lists can't hold one. Instead {remedy}."
        )
    is_known = isinstance(dataset, torch.utils.data.Dataset)
    if not is_known and not any(hasattr(dataset, n) for n in ("__getitem__", "__getitems__")):
        remedy = (
            "An object that can only be iterated must be a torch.utils.data.IterableDataset: wrap "
            "it in one whose __iter__ yields its samples"
            if hasattr(dataset, "__iter__")
            else "Pass a penstock.Dataset, a torch dataset, or an object with __getitem__ and "
            "__len__"
        )
        raise ConfigError(
            f"dataset: got an object of type {type(dataset).__name__}, wanted a dataset. {remedy}."
        )


def _inner_datasets(dataset: Any) -> list[Any]:
    if isinstance(dataset, torch.utils.data.Subset):
        return [dataset.dataset]
    if isinstance(dataset, _WRAPPERS_OF_SEVERAL):
        inner: Any = dataset.datasets
        return list(inner.values() if isinstance(inner, dict) else inner)
    if type(dataset) in (list, tuple):
        return list(dataset[:_CHECKED_ELEMENTS])
    if type(dataset) is dict:
        return list(dataset.values())[:_CHECKED_ELEMENTS]
    return []


def _is_native(part: Any) -> bool:
    return isinstance(part, Source) or any(_is_native(inner) for inner in _inner_datasets(part))


def check_torch_dataset(own: PenstockOptions) -> None:
    """Raise ConfigError for arguments that only native datasets can use."""
    from penstock.augment import Stage

    operations = () if isinstance(own.augment, Mapping) else own.augment or ()
    of_fields = [op for op in operations if op.stage in (Stage.MAP, Stage.FIELD)]
    is_passed = {
        "augment= by field": isinstance(own.augment, Mapping),
        **{f"{type(op).__name__} in augment=": True for op in of_fields},
        "deterministic=": own.deterministic and own.augment is None,
        "read=": own.read != READ_MODE,
        "resident=True": own.resident is True,
        "as_dict=True": own.as_dict is True,
        "batch_tokens=": own.batch_tokens is not None,
        'slots="rank"': own.order.slots != "data",
        "global_batch_size= by samples": isinstance(own.global_batch_size, Mapping),
    }
    for argument in (name for name, passed in is_passed.items() if passed):
        raise ConfigError(
            f"{argument} works on native datasets (penstock.Dataset), but this is a torch "
            "dataset. Drop it, or read the files with penstock.Dataset."
        )


def check_unplanned(own: PenstockOptions, *, is_map: bool) -> None:
    """Raise ConfigError for arguments that need Penstock's own plan."""
    arguments = {
        **shuffle_settings(own.order),
        "pad": own.pad,
        "global_batch_size": own.global_batch_size,
        "max_bad": own.max_bad if is_map else None,
    }
    for name, value in arguments.items():
        if value is not None:
            remedy = (
                f"Pass seed= as well, or drop {name}=."
                if is_map
                else "An iterable dataset brings its own order: drop it."
            )
            raise ConfigError(f"{name}={value!r} needs Penstock's order of the samples. {remedy}")
    if own.max_bad is not None:
        raise ConfigError(
            f"max_bad={own.max_bad!r} replaces bad samples by others, but the samples of an "
            "iterable dataset have no numbers by which to find others. Drop max_bad=, and let "
            "its __iter__ leave out the samples that it can't read."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDataOptions:
    """The checked arguments of a loader over a torch dataset, resolved for one world.

    torch_options: as the user passed them, with attributes that were set since. own: Penstock's.
    indices: the sampler or batch sampler of torch's constructor; None for an iterable dataset.
    batch_size: of this rank's largest batch; None if torch doesn't batch, or a batch sampler does.
    is_batched: samples come in batches. draw_seed: of augmentation, else None. agrees: the world is
    that of torch's process group.
    """

    torch_options: TorchOptions
    own: PenstockOptions
    indices: Any
    batch_size: int | None
    is_batched: bool
    workers: WorkerOptions
    draw_seed: int | None
    world: World
    agrees: bool
    device: torch.device

    @classmethod
    def of(
        cls,
        arguments: LoaderArguments,
        live: Mapping[str, Any],
        *,
        indices: Any,
        batch_size: int | None,
        is_batched: bool,
        is_planned: bool,
    ) -> TorchDataOptions:
        """Resolve the options from a loader's arguments; call it after torch's constructor.

        live: torch's arguments that were set since, by name. indices: the sampler or batch sampler.
        batch_size: as torch has it. is_planned: the order is Penstock's, so the batch size follows
        from the world. Raises ConfigError and PlanError for arguments that don't fit the world.
        """
        options = replace(arguments.torch_options, **live)
        own, world = arguments.own, arguments.world
        is_sharded = shards_by_rank(indices)
        return cls(
            torch_options=options,
            own=own,
            indices=indices,
            batch_size=planned_batch_size(options, own, world) if is_planned else batch_size,
            is_batched=is_batched,
            workers=WorkerOptions.of(options),
            draw_seed=draw_seed(own, arguments.seed, world, is_sharded=is_sharded),
            world=world,
            agrees=arguments.agrees,
            device=arguments.device,
        )

    @property
    def seed(self) -> int | None:
        """The seed of the order and of each sample; None leaves randomness to torch."""
        return None if self.own.seed is None else int(self.own.seed)


def planned_batch_size(
    torch_options: TorchOptions, own: PenstockOptions, world: World
) -> int | None:
    """Return this rank's batch size in Penstock's order of a torch dataset; None for single
    samples.

    Raises ConfigError and PlanError for sizes that don't fit it or the world.
    """
    check_ends(world, drop_last=bool(torch_options.drop_last), pad=own.pad)
    if torch_options.batch_size is None:
        if own.global_batch_size is not None or own.pad is not None:
            raise ConfigError(
                "batch_size=None (single samples) allows no global_batch_size= and no pad=."
            )
        return None
    return batch_sizes(torch_options.batch_size, own.global_batch_size, world).per_rank


def draw_seed(
    own: PenstockOptions, seed: LoaderSeed, world: World, *, is_sharded: bool
) -> int | None:
    """Return the seed of augmentation in a world; None without augmentation.

    is_sharded: a sampler shares the samples out, so each rank has its own crops and its own state.
    Raises ConfigError if several ranks would draw their own crops of the same samples.
    """
    if own.augment is None:
        return None
    if seed.given is None and seed.drawn is not None and is_sharded:
        return seed.drawn
    if seed.given is None and world.size > 1:
        raise ConfigError(
            f"augment= on {world.size} ranks needs seed=, the same on every rank. Penstock then "
            "orders the samples and shares them out, so leave sampler= out. Or pass a sampler that "
            "shares them out, such as torch's DistributedSampler, and no seed=."
        )
    return seed.in_world(world, draws=True)
