"""Write small datasets in the formats of other loaders, with their own libraries."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Row = tuple[bytes, int]  # the bytes of a JPEG, and a class
Sets = dict[str, list[Row]]
Writer = Callable[[Sets], None]


def write_mds(sets: Sets) -> None:
    """Write MDS shards of about 16 KiB, compressed as a whole, and one of token sequences."""
    from streaming import MDSWriter

    columns = {"image": "jpeg", "label": "int"}
    folder = Path("store/bucket/mds")
    file = Path("image.jpg")  # the writer stores the bytes of a file that an image was opened from
    for name, samples in sets.items():
        with MDSWriter(
            out=str(folder / name), columns=columns, size_limit=1 << 14, compression="zstd"
        ) as shards:
            for encoded, label in samples:
                file.write_bytes(encoded)
                with Image.open(file) as image:
                    shards.write({"image": image, "label": label})
    with MDSWriter(out=str(folder / "text"), columns={"tokens": "ndarray"}) as shards:
        for each in np.load("tokens.npy"):
            shards.write({"tokens": each.astype(np.int32)})


def write_chunks(sets: Sets) -> None:
    """Write LitData's chunks of about 16 KB."""
    from litdata import optimize

    for name, samples in sets.items():
        optimize(
            fn=_chunk_sample,
            inputs=samples,
            output_dir=f"store/bucket/chunks/{name}",
            chunk_bytes="16KB",
            num_workers=1,
            start_method="spawn",
            verbose=False,
        )


def _chunk_sample(row: Row) -> dict[str, Any]:
    return {"image": row[0], "label": row[1]}


def write_array_record(sets: Sets) -> None:
    """Write ArrayRecord files of records in msgpack."""
    import msgpack
    from array_record.python.array_record_module import ArrayRecordWriter

    for name, samples in sets.items():
        writer = ArrayRecordWriter(f"{name}.array_record", "group_size:1")
        for image, label in samples:
            writer.write(msgpack.packb({"image": image, "label": label}))
        writer.close()


def write_tfrecord(sets: Sets) -> None:
    """Write two TFRecord files of each set."""
    import tensorflow as tf

    for name, samples in sets.items():
        for part in range(2):
            with tf.io.TFRecordWriter(f"{name}-{part:05d}-of-00002.tfrecord") as file:
                for image, label in samples[part * len(samples) // 2 :][
                    : (len(samples) + part) // 2
                ]:
                    features = tf.train.Features(
                        feature={
                            "image/encoded": tf.train.Feature(
                                bytes_list=tf.train.BytesList(value=[image])
                            ),
                            "image/class/label": tf.train.Feature(
                                int64_list=tf.train.Int64List(value=[label])
                            ),
                        }
                    )
                    file.write(tf.train.Example(features=features).SerializeToString())


class Decoded:
    """The samples of a set with decoded images, as FFCV's writer reads them."""

    def __init__(self, samples: list[Row]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, at: int) -> tuple[Image.Image, int]:
        encoded, label = self._samples[at]
        return Image.open(io.BytesIO(encoded)).convert("RGB"), label


def write_beton(sets: Sets) -> None:
    """Write a .beton of raw pixels of each set, but `train` and `damaged` as JPEG."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    for name, samples in sets.items():
        mode = "jpg" if name in {"train", "damaged"} else "raw"
        fields = {"image": RGBImageField(write_mode=mode, jpeg_quality=95), "label": IntField()}
        DatasetWriter(f"{name}.beton", fields, num_workers=1).from_indexed_dataset(Decoded(samples))
