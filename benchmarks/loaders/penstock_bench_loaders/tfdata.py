"""Play tf.data: TensorFlow's own fused decode-and-crop, its threads, DLPack to torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.pipeline.bench.adapters import (
    AREA,
    DEVIATION,
    IMAGE_FOLDER,
    MEAN,
    RATIO,
    Adapter,
    list_files,
)

if TYPE_CHECKING:
    from penstock.pipeline.bench.adapters import Batches, PlayedLoader, Work


class TfDataLoader:
    """Build the loader: names are shuffled over the whole dataset; tf.data's private threads read
    the images and decode only the window of a crop."""

    def __init__(self, work: Work) -> None:
        import tensorflow as tf

        # Operators would add threads of their own; the setting works only before the first use.
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(work.workers)
        self._dlpack = tf.experimental.dlpack
        files = list_files(work.folder)
        mean, deviation = tf.constant(MEAN), tf.constant(DEVIATION)

        def image(path: Any, label: Any) -> tuple[Any, Any]:
            encoded = tf.io.read_file(path)
            begin, length, _ = tf.image.sample_distorted_bounding_box(
                tf.image.extract_jpeg_shape(encoded),
                bounding_boxes=tf.zeros((1, 0, 4), tf.float32),
                aspect_ratio_range=RATIO,
                area_range=AREA,
                max_attempts=10,
                use_image_if_no_bounding_boxes=True,
            )
            window = tf.stack([begin[0], begin[1], length[0], length[1]])
            pixels = tf.image.decode_and_crop_jpeg(
                encoded, window, channels=3, fancy_upscaling=False
            )
            pixels = tf.image.resize(pixels, (work.size, work.size), method="bilinear")
            pixels = tf.image.random_flip_left_right(pixels)
            return tf.transpose((pixels - mean) / deviation, (2, 0, 1)), label

        names = tf.data.Dataset.from_tensor_slices(
            (files.paths, tf.constant(files.labels, tf.int64))
        )
        dataset = (
            names.shuffle(len(files), seed=work.seed, reshuffle_each_iteration=True)
            .repeat()
            .map(image, num_parallel_calls=work.workers, deterministic=False)
            .batch(work.batch_size, drop_remainder=True)
            .prefetch(tf.data.AUTOTUNE)
        )
        options = tf.data.Options()
        options.threading.private_threadpool_size = work.workers
        options.threading.max_intra_op_parallelism = 1
        self.dataset = dataset.with_options(options)

    def batches(self) -> Batches:
        from torch.utils.dlpack import from_dlpack

        for images, labels in self.dataset:
            yield (
                from_dlpack(self._dlpack.to_dlpack(images)),
                from_dlpack(self._dlpack.to_dlpack(labels)),
            )

    def close(self) -> None:
        del self.dataset


def build(work: Work) -> PlayedLoader:
    return TfDataLoader(work)


ADAPTERS = (
    Adapter(
        name="tfdata",
        title="tf.data",
        needs=("tensorflow",),
        imports=("tensorflow",),
        install="pip install tensorflow-cpu",
        reads=IMAGE_FOLDER,
        distribution="tensorflow-cpu",
        build=build,
    ),
)
