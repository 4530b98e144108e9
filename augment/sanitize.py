"""SanitizeBoxes: boxes of which a recipe leaves too little are dropped."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from penstock.augment.checks import field_names, is_number
from penstock.cache.errors import RecipeError, explain_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class SanitizeBoxes:
    """Drops boxes of which too little is left, and with them their rows of fields `of` them.

    It stands anywhere behind what crops, resizes and flips, and looks at the boxes in the end,
    clipped to their image, as torchvision's SanitizeBoundingBoxes does behind ClampBoundingBoxes.
    min_size: in pixels of the result; a box of less width or height is dropped. min_area: likewise
    of its area. fields: names of the boxes; None: all that follow an image of the recipe. Without
    this operation boxes are only clipped, and keep their number.
    """

    min_size: float = 1.0
    min_area: float = 1.0
    _: KW_ONLY
    fields: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("min_size", "min_area"):
            value = getattr(self, name)
            if not is_number(value) or value < 0:
                raise RecipeError(
                    f"SanitizeBoxes({name}=...): got {value!r}, wanted pixels, 0 or more."
                )
            object.__setattr__(self, name, float(value))
        object.__setattr__(self, "fields", field_names("SanitizeBoxes(fields=...)", self.fields))

    def keeps(self, boxes: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Which boxes stay, bool, (k,). boxes: x1, y1, x2, y2, clipped, shape (k, 4)."""
        width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
        large = (width >= self.min_size) & (height >= self.min_size)
        return large & (width * height >= self.min_area)
