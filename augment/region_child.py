"""Decode windows on one GPU in a process of its own, and compare them with crops of full images.

`devices` runs it by its path. It reads {"path": sys.path, "device_id": n} from standard input; null
as device is the CPU. It exits with 0 if the pixels agree.
"""

from __future__ import annotations

import io
import json
import resource
import sys
from typing import Any

# Sizes, qualities and chroma subsampling of usual photographs, some with sides that aren't a
# multiple of the blocks.
SIZES = ((375, 500), (500, 333), (256, 256), (480, 641), (97, 203), (768, 1024)) * 3
QUALITIES = (75, 90, 95)
BATCHES = 3
# Largest mean difference, of 255: the hardware's, CUDA's and the CPU's decoders round and upsample
# differently.
MOST_MEAN = 6.0


def images() -> list[Any]:
    """Return encoded JPEGs as uint8 arrays."""
    import numpy
    from PIL import Image

    made = []
    for number, (height, width) in enumerate(SIZES):
        y, x = numpy.mgrid[:height, :width]
        waves = [numpy.sin(x / (9 + 5 * k) + number) * numpy.cos(y / 13) for k in range(3)]
        pixels = (127 + 120 * numpy.stack(waves, axis=2)).astype(numpy.uint8)
        options = {"subsampling": number % 3, "progressive": number % 7 == 6}
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=QUALITIES[number % 3], **options)
        made.append(numpy.frombuffer(buffer.getvalue(), numpy.uint8))
    return made


def main() -> int:
    """Decode both ways, compare, and return the exit code."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump: it may crash
    request = json.loads(sys.stdin.read())
    sys.path[:] = request["path"]
    import numpy
    from nvidia.dali import math

    from penstock.augment.dali_library import fn, new_pipeline, types
    from penstock.augment.dali_nodes import source

    device_id, encoded = request["device_id"], images()
    decoding = {"output_type": types.RGB, "adjust_orientation": True}
    if device_id is not None:
        decoding["device"] = "mixed"
    pipe = new_pipeline(len(encoded), threads=2, device_id=device_id)
    with pipe:
        data = source("data", "uint8", 1)
        window = {name: source(name, "int32", 1) for name in ("start", "shape")}
        alone = fn.decoders.image_slice(data, **window, axes=[0, 1], **decoding)
        cropped = fn.slice(fn.decoders.image(data, **decoding), **window, axes=[0, 1])
        apart = math.abs(fn.cast(alone, dtype=types.FLOAT) - fn.cast(cropped, dtype=types.FLOAT))
        pipe.set_outputs(fn.reductions.mean(apart).cpu())
    pipe.build()
    worst, sizes = 0.0, numpy.array(SIZES)
    for seed in range(BATCHES):
        draws = numpy.random.default_rng(seed)
        shape = (sizes * draws.uniform(0.3, 1.0, sizes.shape)).astype(numpy.int32)
        start = (draws.uniform(0, 1, sizes.shape) * (sizes - shape + 1)).astype(numpy.int32)
        for name, values in (("data", encoded), ("start", start), ("shape", shape)):
            pipe.feed_input(name, list(values))
        worst = max(worst, float(pipe.run()[0].as_array().max()))
    if worst > MOST_MEAN:
        sys.stderr.write(f"windows differ from whole images by {worst:.1f} of 255\n")
        return 3
    sys.stdout.write(
        f"{BATCHES * len(encoded)} windows differ from whole images by {worst:.2f} of 255 at most\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
