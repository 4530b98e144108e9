"""Types of fields as another package provides them, each in one class."""

from __future__ import annotations

import calendar
import io
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image

from penstock.readers import Rejection
from penstock.readers.fieldtypes import ArrayForm, DenseColumn, FieldType

if TYPE_CHECKING:
    from collections.abc import Set

    from numpy.typing import NDArray

    from penstock.readers import Encoded
    from penstock.readers.fieldtypes import Moves


@dataclass(frozen=True)
class Depth(FieldType):
    """Metres of each pixel, float32, from PNG files of 16 bits. scale: metres of one step. of: the
    image that it follows through a recipe."""

    scale: float = 0.001
    of: str | None = None

    kind: ClassVar[str] = "guest.depth"
    refers_to: ClassVar[str] = "image"
    is_encoded: ClassVar[bool] = True

    @property
    def decoded(self) -> ArrayForm:
        return ArrayForm.of("float32", (None, None))

    def decode(self, payload: Encoded) -> NDArray[np.float32]:
        with Image.open(io.BytesIO(payload.data)) as image:
            return np.asarray(image, np.float32) * np.float32(self.scale)

    @property
    def needs_size(self) -> bool:
        return True

    def follow(self, column: Any, moves: Moves | None, *, size: Any) -> DenseColumn:
        maps = [column.sample(row) for row in range(len(column))]
        if moves is None:
            return DenseColumn(np.reshape(maps, (-1, *size)))
        return DenseColumn(moves.move_masks(maps, dtype="float32"))


@dataclass(frozen=True)
class RunLengths(FieldType):
    """A mask of fixed size as pairs of bytes (count, value)."""

    size: tuple[int, int]

    kind: ClassVar[str] = "guest.run_lengths"
    is_encoded: ClassVar[bool] = True

    @property
    def decoded(self) -> ArrayForm:
        return ArrayForm.of("uint8", self.size)

    def decode(self, payload: Encoded) -> NDArray[np.uint8]:
        pairs = payload.reshape(-1, 2)
        return np.repeat(pairs[:, 1], pairs[:, 0]).reshape(self.size)


@dataclass(frozen=True)
class Document(FieldType):
    """A document in JSON, delivered as its value."""

    kind: ClassVar[str] = "guest.document"
    is_encoded: ClassVar[bool] = True
    missing: ClassVar[Any] = {}

    @property
    def in_tables(self) -> bool:
        return True

    @property
    def column_kinds(self) -> Set[str]:
        return {"text", "binary"}

    def decode(self, payload: Encoded) -> Any:
        return json.loads(payload.tobytes())


@dataclass(frozen=True)
class Cloud(FieldType):
    """Points, float32, (points, 3), from files of bare numbers."""

    kind: ClassVar[str] = "guest.cloud"
    is_encoded: ClassVar[bool] = True

    @property
    def decoded(self) -> ArrayForm:
        return ArrayForm.of("float32", (None, 3))

    def decode(self, payload: Encoded) -> NDArray[np.float32]:
        return payload.view("<f4").reshape(-1, 3)


@dataclass(frozen=True)
class Timestamp(FieldType):
    """Seconds since 1970 from a text such as 2026-11-27T22:15:00, int64."""

    kind: ClassVar[str] = "guest.timestamp"

    @property
    def number(self) -> np.dtype[Any]:
        return np.dtype(np.int64)

    @property
    def column_kinds(self) -> Set[str]:
        return {"number", "text"}

    def cell(self, value: Any, *, is_text: bool) -> Any:
        del is_text
        return calendar.timegm(time.strptime(value, "%Y-%m-%dT%H:%M:%S"))

    def show(self, value: Any) -> str:
        return time.strftime("%Y-%m-%d", time.gmtime(int(value)))


@dataclass(frozen=True)
class Quaternion(FieldType):
    """A rotation, float32, of length 1."""

    kind: ClassVar[str] = "guest.quaternion"

    @property
    def form(self) -> ArrayForm:
        return ArrayForm.of("float32", (4,))

    def check_values(self, values: NDArray[Any], size: Any = None) -> Rejection | None:
        del size
        length = float(np.linalg.norm(values))
        return None if abs(length - 1) < 1e-3 else Rejection(f"its length is {length:.3g}, not 1")
