"""A policy's operations as DALI operators, for the CPU and for CUDA.

Each sample goes through the operators of its own operation only: a round splits the batch by kind
in a binary tree and merges it again, which hands pixels on without a copy. DALI decides nothing;
see `policies` for what does.

Milliseconds that they take of a core for a 224 x 224 image (DALI 2.4, CPU): color 2.0, autocontrast
0.9, affine and solarize 0.5, the others 0.1 to 0.2. What is slow is float pixels to uint8, 1.7 in
fn.cast: so contrast and autocontrast go through operators that compute inside. Blending with the
grey image by arithmetic is no faster than fn.saturation.

Where pixels differ from torchvision's on Pillow images, in units of 0..255:
- affine: nearest neighbours at float32 points, where Pillow's are of 16.16 fixed point: at most 1 %
  of the pixels come from the neighbour.
- brightness, contrast, color, autocontrast: rounded, where torchvision cuts off: by 1 at most
  (color 2, whose grey image Pillow rounds too).
- sharpness: by 1 at most, but for the outermost pixels, which torchvision leaves as they are; here
  the filter sees the image mirrored at its edge.
- equalize is OpenCV's: level v becomes 255 (c(v) - c(first)) / (n - c(first)), c counting pixels up
  to v, where Pillow counts those below v and steps in whole pixels: on photographs by 2 on average,
  and by more where few levels hold most pixels.
- posterize, solarize, invert: not at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.augment.pixel_nodes import contrast
from penstock.augment.policies import KINDS, rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.augment.policies import Policy

_MAX = 255


def policy_nodes(op: Policy, images: Any, inputs: Mapping[str, Any]) -> Any:
    """The images after a policy: uint8, HWC, RGB, in and out, on the device where they are.

    inputs: nodes on the CPU by the suffixes of `policies.policy_inputs`.
    """
    for number in range(rounds(op)):
        arguments = {name: inputs[f"{name}{number}"] for name in ("kind", "matrix", "value")}
        images = _one_of({"images": images, **arguments}, 0, len(KINDS), fill=op.fill or 0.0)
    return images


def _one_of(nodes: dict[str, Any], low: int, high: int, *, fill: float) -> Any:
    """The images after the kinds [low, high), one each."""
    from nvidia.dali import fn

    if high - low == 1:
        return _apply(KINDS[low], nodes, fill)
    # What DALI's own `if` is made of, as in `nodes`.
    conditional: Any = fn._conditional  # type: ignore[attr-defined]  # made at import time
    middle = (low + high) // 2
    first = nodes["kind"] < middle
    left, right = {}, {}
    for name, node in nodes.items():
        left[name], right[name] = conditional.split(node, predicate=first, _if_stmt=True)
    return conditional.merge(
        _one_of(left, low, middle, fill=fill),
        _one_of(right, middle, high, fill=fill),
        predicate=first,
    )


def _apply(kind: str, nodes: dict[str, Any], fill: float) -> Any:
    images, value = nodes["images"], nodes["value"]
    if kind == "identity":
        return images
    if kind == "affine":
        return _affine(images, nodes["matrix"], fill)
    return _OPERATORS[kind](images, value)


def _affine(images: Any, matrix: Any, fill: float) -> Any:
    from nvidia.dali import fn, types

    return fn.warp_affine(images, matrix=matrix, fill_value=fill, interp_type=types.INTERP_NN)


def _brightness(images: Any, factor: Any) -> Any:
    from nvidia.dali import fn

    return fn.brightness_contrast(images, brightness=factor)


def _contrast(images: Any, factor: Any) -> Any:
    """Towards, or away from, the mean of the grey image."""
    return contrast(images, factor, _gray(images))


def _gray(images: Any) -> Any:
    """Luma, one channel: 0.299 R + 0.587 G + 0.114 B."""
    from nvidia.dali import fn, types

    return fn.color_space_conversion(images, image_type=types.RGB, output_type=types.GRAY)


def _to_uint8(images: Any) -> Any:
    """Rounded and clipped to 0..255."""
    from nvidia.dali import fn, types

    return fn.cast(images, dtype=types.UINT8)


def _color(images: Any, factor: Any) -> Any:
    """Towards, or away from, the grey image."""
    from nvidia.dali import fn

    return fn.saturation(images, saturation=factor)


def _sharpness(images: Any, factor: Any) -> Any:
    """Towards, or away from, the image smoothed by [1 1 1; 1 5 1; 1 1 1] / 13."""
    from nvidia.dali import fn

    # From numbers: an array would be a batch of its own, and here is only a part of the batch.
    around = (1 - factor) / 13.0
    middle = factor + 5 * around
    kernel = fn.reshape(fn.stack(*[around] * 4, middle, *[around] * 4), shape=[3, 3])
    return fn.filter(images, _beside(images, kernel))


def _posterize(images: Any, mask: Any) -> Any:
    return images & _level(images, mask)


def _solarize(images: Any, threshold: Any) -> Any:
    """x becomes 255 - x, which is x ^ 255, where it is at least the threshold."""
    from nvidia.dali import types

    bright = images >= _level(images, threshold)
    return images ^ (bright * types.Constant(_MAX, dtype=types.UINT8))


def _autocontrast(images: Any, _: Any) -> Any:
    """Each channel stretched to 0..255; one of a single level stays as it is."""
    from nvidia.dali import fn, types

    low, spread = _low_and_spread(images)
    if images.device == "gpu":
        return _autocontrast_by_arithmetic(images, low, spread)
    low, spread = (fn.cast(node, dtype=types.FLOAT) for node in (low, spread))
    return fn.normalize(
        images, axes=[0, 1], mean=low, stddev=spread, scale=float(_MAX), dtype=types.UINT8
    )


def _autocontrast_by_arithmetic(images: Any, low: Any, spread: Any) -> Any:
    """As above, where what was computed from pixels can't be an argument."""
    from nvidia.dali import types

    return _to_uint8((images - low) * (types.Constant(float(_MAX)) / spread))


def _low_and_spread(images: Any) -> tuple[Any, Any]:
    """A channel's lowest level and how far the highest is above; 0 and 255 if they are one."""
    from nvidia.dali import fn, types

    low = fn.reductions.min(images, axes=[0, 1], keep_dims=True)
    spread = fn.reductions.max(images, axes=[0, 1], keep_dims=True) - low
    full = types.Constant(_MAX, dtype=types.UINT8)
    # There is no `if` in DALI's arithmetic.
    return low * (spread > 0), spread + (spread == 0) * full


def _equalize(images: Any, _: Any) -> Any:
    from nvidia.dali import fn

    return fn.equalize(images)


def _level(images: Any, value: Any) -> Any:
    """A number per sample as uint8, beside the images."""
    from nvidia.dali import fn, types

    return _beside(images, fn.cast(value, dtype=types.UINT8))


def _beside(images: Any, node: Any) -> Any:
    """A node where the images are."""
    return node.gpu() if images.device == "gpu" else node


_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "brightness": _brightness,
    "contrast": _contrast,
    "color": _color,
    "sharpness": _sharpness,
    "posterize": _posterize,
    "solarize": _solarize,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
}
