"""Decode windows on one GPU in a process of its own, and compare them with crops of full images.

`devices` runs it by its path, so it imports no other module of Penstock. It reads {"path":
sys.path, "device_id": n} from standard input; null as device is the CPU. It exits with 0 if the
pixels agree.
"""

from __future__ import annotations

import io
import json
import resource
import sys
from typing import Any

# Sizes, qualities and chroma subsampling of usual photographs, some with sides that aren't a
# multiple of the blocks.
SIZES = ((375, 500), (500, 333), (256, 256), (480, 641), (97, 203), (768, 1024))
QUALITIES = (75, 90, 95)
BATCHES = 3
# Largest mean difference, of 255: the hardware's, CUDA's and the CPU's decoders round and upsample
# differently.
MOST_MEAN = 6.0


def images(numpy: Any, image_module: Any) -> list[Any]:
    """Return encoded JPEGs as uint8 arrays."""
    made = []
    for number, (height, width) in enumerate(SIZES * len(QUALITIES)):
        y, x = numpy.mgrid[:height, :width]
        waves = [numpy.sin(x / (9 + 5 * k) + number) * numpy.cos(y / 13) for k in range(3)]
        pixels = (127 + 120 * numpy.stack(waves, axis=2)).astype(numpy.uint8)
        buffer = io.BytesIO()
        image_module.fromarray(pixels).save(
            buffer,
            "JPEG",
            quality=QUALITIES[number % len(QUALITIES)],
            subsampling=number % 3,
            progressive=number % 7 == 6,
        )
        made.append(numpy.frombuffer(buffer.getvalue(), numpy.uint8))
    return made


def windows(numpy: Any, seed: int) -> tuple[Any, Any]:
    """Return (start, shape) of a window in each image, int32, (n, 2) each."""
    draws = numpy.random.default_rng(seed)
    sizes = numpy.array(SIZES * len(QUALITIES))
    shape = (sizes * draws.uniform(0.3, 1.0, sizes.shape)).astype(numpy.int32)
    start = (draws.uniform(0, 1, sizes.shape) * (sizes - shape + 1)).astype(numpy.int32)
    return start, shape


def main() -> int:
    """Decode both ways, compare, and return the exit code."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump: it may crash
    request = json.loads(sys.stdin.read())
    sys.path[:] = request["path"]
    import numpy
    from nvidia.dali import Pipeline, fn, types
    from PIL import Image

    device_id = request["device_id"]
    decoding = {"output_type": types.RGB, "adjust_orientation": True}
    if device_id is not None:
        decoding["device"] = "mixed"
    encoded = images(numpy, Image)
    pipe = Pipeline(
        batch_size=len(encoded),
        num_threads=2,
        device_id=device_id,
        prefetch_queue_depth=1,
        exec_dynamic=True,
    )
    with pipe:
        data = fn.external_source(name="data", dtype=types.UINT8, ndim=1)
        start = fn.external_source(name="start", dtype=types.INT32, ndim=1)
        shape = fn.external_source(name="shape", dtype=types.INT32, ndim=1)
        window = {"start": start, "shape": shape, "axes": [0, 1]}
        alone = fn.decoders.image_slice(data, **window, **decoding)
        cropped = fn.slice(fn.decoders.image(data, **decoding), **window)
        away = [fn.cast(node, dtype=types.FLOAT) for node in (alone, cropped)]
        pipe.set_outputs(*(node.cpu() for node in away))
    pipe.build()
    worst = 0.0
    for seed in range(BATCHES):
        start, shape = windows(numpy, seed)
        for name, values in (("data", encoded), ("start", start), ("shape", shape)):
            pipe.feed_input(name, list(values))
        ours, theirs = pipe.run()
        for number in range(len(encoded)):
            one, other = numpy.array(ours.at(number)), numpy.array(theirs.at(number))
            worst = max(worst, float(abs(one - other).mean()))
    if worst > MOST_MEAN:
        sys.stderr.write(f"windows differ from whole images by {worst:.1f} of 255\n")
        return 3
    sys.stdout.write(
        f"{BATCHES * len(encoded)} windows differ from whole images by {worst:.2f} of 255 at most\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
