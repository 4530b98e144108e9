"""The arguments that a DataLoader takes beyond torch's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from penstock.augment.map import Map
from penstock.augment.pad import Pad
from penstock.augment.sanitize import SanitizeBoxes
from penstock.augment.unpack import Unpack
from penstock.cache.base.blob import READ_MODE, ReadMode
from penstock.cache.errors import ConfigError
from penstock.pipeline.options.checks import (
    check_choice,
    check_resident,
    check_seed,
    check_share,
    check_tokens,
)
from penstock.pipeline.options.order_options import DEFAULT_ORDER, Order, shuffle_settings
from penstock.pipeline.options.refusals import refuse_native_arguments, refuse_without_plan

if TYPE_CHECKING:
    import torch

    from penstock.augment.field_recipes import Recipes
    from penstock.pipeline.options.sizes import GlobalBatch

ResidentMode = bool | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PenstockOptions:
    """What a DataLoader takes beyond torch's arguments, but for the world, as the user gave it.

    Raises ConfigError for a value that fits no dataset.
    """

    seed: int | None = None
    augment: Recipes | None = None
    device: str | torch.device | int = "cpu"
    global_batch_size: GlobalBatch | None = None
    pad: Literal["mask"] | None = None
    max_bad: float | None = None
    deterministic: bool = False
    order: Order = DEFAULT_ORDER
    read: ReadMode = READ_MODE
    resident: ResidentMode = False
    as_dict: bool = False
    batch_tokens: int | Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if not isinstance(self.order, Order):
            raise ConfigError(
                f"order must be an Order, such as Order(lanes=8), got {self.order!r}."
            )
        check_tokens(self.batch_tokens)
        check_choice("pad", self.pad, (None, "mask"))
        check_choice("read", self.read, get_args(ReadMode))
        check_resident(self.resident)
        if self.max_bad is not None:
            check_share("max_bad", self.max_bad)
        check_choice("as_dict", self.as_dict, (True, False))

    def check_foreign(self) -> None:
        """Raise ConfigError for what only native datasets have a use for."""
        operations = () if isinstance(self.augment, Mapping) else self.augment or ()
        of_fields = [op for op in operations if isinstance(op, (Map, Pad, SanitizeBoxes, Unpack))]
        refuse_native_arguments(
            {
                "augment= by field": isinstance(self.augment, Mapping),
                **{f"{type(op).__name__} in augment=": True for op in of_fields},
                "deterministic": self.deterministic and self.augment is None,
                "read": self.read != READ_MODE,
                "resident=True": self.resident is True,
                "as_dict=True": self.as_dict is True,
                "batch_tokens": self.batch_tokens is not None,
                'slots="rank"': self.order.slots != "data",
                "global_batch_size= by samples": isinstance(self.global_batch_size, Mapping),
            }
        )

    def check_unplanned(self, *, is_map: bool) -> None:
        """Raise ConfigError for what only Penstock's own plan can honour."""
        order = shuffle_settings(self.order)
        refuse_without_plan(
            {
                "lanes": order.get("lanes"),
                "window": order.get("window"),
                "pad": self.pad,
                "reshuffle": order.get("reshuffle"),
                "global_batch_size": self.global_batch_size,
                "max_bad": self.max_bad if is_map else None,
            },
            is_map=is_map,
        )
        if self.max_bad is not None:
            raise ConfigError(
                f"max_bad={self.max_bad!r} lets others stand in for bad samples, and those of an "
                "iterable dataset have no numbers to find others by: drop max_bad=, and let its "
                "__iter__ leave out what it can't read."
            )
