"""The arguments that a DataLoader shares with torch's."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from penstock.pipeline.options.checks import check_counts, check_timeout
from penstock.pipeline.options.refusals import refuse_torch_arguments, refuse_with_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions:
    """What torch's DataLoader takes beside its dataset, as the user gave it, by torch's names."""

    batch_size: int | None = 1
    shuffle: bool | None = None
    sampler: Any = None
    batch_sampler: Any = None
    num_workers: int = 0
    collate_fn: Callable[..., Any] | None = None
    pin_memory: bool = False
    drop_last: bool = False
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    generator: torch.Generator | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory_device: str = ""
    in_order: bool = True

    def arguments(self) -> dict[str, Any]:
        """The options as keyword arguments for torch's constructor."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def check_native(self) -> None:
        """Raise ConfigError for what a native dataset has no use for, and for wrong numbers.

        torch's own constructor checks them for a torch dataset.
        """
        refuse_torch_arguments(self.arguments())
        check_counts(num_workers=self.num_workers, prefetch_factor=self.prefetch_factor)
        check_timeout(self.timeout)

    def check_planned(self) -> None:
        """Raise ConfigError for what would order samples beside Penstock's own plan."""
        refuse_with_seed(
            {
                "sampler": self.sampler,
                "batch_sampler": self.batch_sampler,
                "generator": self.generator,
                "in_order=False": None if self.in_order else True,
            }
        )
