"""What is noted of a shard's images, a column each: the part that all sidecars share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.readers.formats.summary import FieldNotes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.verify import SampleFacts

ARROW_TYPES = {
    "crc32c": "uint32",
    "height": "int32",
    "width": "int32",
    "channels": "int32",
    "codec": "string",
    "label": "int64",
}
"""Arrow types by name, in order; labels may be absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageColumns:
    """What is noted of n images. crcs: of the encoded bytes; labels: None without."""

    crcs: NDArray[np.uint32]
    heights: NDArray[np.int32]
    widths: NDArray[np.int32]
    channels: NDArray[np.int32]
    codecs: Sequence[str]
    labels: NDArray[np.int64] | None

    @classmethod
    def of(cls, facts: Sequence[SampleFacts], labels: NDArray[np.int64] | None) -> ImageColumns:
        """Gather what full decodes told."""
        images = [each.image for each in facts]
        return cls(
            crcs=np.array([each.crc32c for each in facts], np.uint32),
            heights=np.array([image.height for image in images], np.int32),
            widths=np.array([image.width for image in images], np.int32),
            channels=np.array([image.channels for image in images], np.int32),
            codecs=[image.codec for image in images],
            labels=labels,
        )

    @classmethod
    def read(cls, batch: Any) -> ImageColumns:
        """Take the columns of a sidecar's record batch."""
        return cls(
            crcs=batch.column("crc32c").to_numpy(),
            heights=batch.column("height").to_numpy(),
            widths=batch.column("width").to_numpy(),
            channels=batch.column("channels").to_numpy(),
            codecs=batch.column("codec").to_pylist(),
            labels=batch.column("label").to_numpy() if "label" in batch.schema.names else None,
        )

    def arrow(self) -> dict[str, Any]:
        """The columns as Arrow arrays, by name and in order."""
        columns = {
            "crc32c": pa.array(self.crcs, pa.uint32()),
            "height": pa.array(self.heights, pa.int32()),
            "width": pa.array(self.widths, pa.int32()),
            "channels": pa.array(self.channels, pa.int32()),
            "codec": pa.array(list(self.codecs), pa.string()),
        }
        if self.labels is not None:
            columns["label"] = pa.array(self.labels, pa.int64())
        return columns

    def notes(self, *, progressive: int | None = None) -> dict[str, FieldNotes]:
        """What goes into a manifest, by field."""
        shapes = np.stack((self.heights, self.widths, self.channels), axis=1).astype(np.int64)
        image = FieldNotes(
            storage="span",
            crcs=self.crcs,
            shapes=shapes,
            codecs=self.codecs,
            progressive=progressive,
        )
        if self.labels is None:
            return {"image": image}
        return {"image": image, "label": FieldNotes(storage="value", values=self.labels)}
