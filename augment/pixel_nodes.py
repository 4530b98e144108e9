"""Pixel operations as DALI operators. Called inside a pipeline's definition; nothing runs here.

Measured with DALI 2.4 on the CPU: an arithmetic operator is no part of a fused expression but a
pass over memory of its own, so int16 takes half of what float32 takes; rounding float32 to uint8
takes 1.1 ms an image of 224 x 224, int16 to uint8 0.3, and uint8 times a factor to int16 0.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.augment.culprits import check_machine, reason_of
from penstock.cache.errors import RecipeError

if TYPE_CHECKING:
    from penstock.augment.ops import Apply, ColorJitter, GaussianBlur, RandomErasing, RandomRotation
    from penstock.augment.pixels import Shape

    Nodes = dict[str, Any]

_SEXTANTS = (5.0, 3.0, 1.0)  # of red, green and blue on the circle of hues, 6 for once round


def flip(images: Any, mirror: Any, *, vertical: bool = False) -> Any:
    """Mirror images left to right where `mirror` is 1; vertical: upside down."""
    from nvidia.dali import fn

    if vertical:
        return fn.flip(images, horizontal=0, vertical=mirror)
    return fn.flip(images, horizontal=mirror, vertical=0)


def jitter(_: ColorJitter, images: Any, inputs: Nodes, shape: Shape) -> Any:
    """adjust_brightness, _contrast, _saturation and _hue of torchvision, in this order."""
    from nvidia.dali import fn

    if (factor := inputs.get("brightness")) is not None:
        images = fn.brightness_contrast(images, brightness=factor)
    if (factor := inputs.get("contrast")) is not None:
        gray = _gray(images) if shape.channels == 3 else images
        images = contrast(images, factor, gray)
    if (factor := inputs.get("saturation")) is not None:
        gray = _rgb(_gray(images))
        # Of opposite signs, if not both small: they can't overflow together.
        images = _uint8(_int16(images, factor) + _int16(gray, 1.0 - factor))
    if (shift := inputs.get("hue")) is not None:
        images = _shift_hue(images, shift, shape)
    return images


def contrast(images: Any, factor: Any, gray: Any) -> Any:
    """Blend with the mean of the grey image, or away from it. factor: on the CPU."""
    from nvidia.dali import fn

    if images.device == "gpu":
        return contrast_by_arithmetic(images, factor.gpu(), gray)
    middle = fn.reductions.mean(gray)
    return fn.brightness_contrast(images, contrast=factor, contrast_center=middle)


def contrast_by_arithmetic(images: Any, factor: Any, gray: Any) -> Any:
    """As above, all on one device. Argument inputs come from the CPU: as one, what was computed
    from pixels on the GPU would make the host wait for the device in each batch."""
    from nvidia.dali import fn

    middle = fn.reductions.mean(gray, axes=[0, 1], keep_dims=True)
    return _uint8(images * factor + middle * (1 - factor))


def _gray(images: Any) -> Any:
    """One channel: 0.299 R + 0.587 G + 0.114 B."""
    from nvidia.dali import fn, types

    return fn.color_space_conversion(images, image_type=types.RGB, output_type=types.GRAY)


def _rgb(gray: Any) -> Any:
    from nvidia.dali import fn, types

    return fn.color_space_conversion(gray, image_type=types.GRAY, output_type=types.RGB)


def _uint8(images: Any) -> Any:
    """Rounded and clipped to 0..255."""
    from nvidia.dali import fn, types

    return fn.cast(images, dtype=types.UINT8)


def _shift_hue(images: Any, shift: Any, shape: Shape) -> Any:
    """RGB to HSV, hue + shift (1 for once round), and back: exact to rounding, not DALI's own hue,
    which turns the colours in YIQ and so changes value and saturation.

    With c = max - min and a hue H of 6 for once round, a channel is
    max - c * clamp(|distance of H + n from 3, round the circle| - 1, 0, 1); everything is computed
    times c, so that there is no division and int16 is enough.
    """
    from nvidia.dali import fn, math, types

    planes = fn.transpose(images, perm=[2, 0, 1])
    size = [shape.height, shape.width, 1]
    red, green, blue = (fn.reshape(planes[k], shape=size, layout="HWC") for k in range(3))
    high = math.max(math.max(red, green), blue)
    chroma = high - math.min(math.min(red, green), blue)
    hue = _hue(red, green, blue, high, chroma)
    most, c, c3 = _int16(high), _int16(chroma), _int16(chroma, 3.0)
    zero = types.Constant(0, dtype=types.INT16)
    shifted = []
    for sextant in _SEXTANTS:
        turn = shift * 6.0 + sextant
        turn = turn - 6.0 * math.floor(turn * (1 / 6) + 0.5)  # -3 to 3
        away = math.abs(math.abs(hue + _int16(chroma, turn)) - c3) - c
        # math.clamp takes three times as long.
        shifted.append(most - math.min(math.max(away, zero), c))
    whole = [shape.channels, shape.height, shape.width]
    whole = fn.reshape(fn.cat(*shifted, axis=0), shape=whole, layout="CHW")
    return fn.crop_mirror_normalize(whole, dtype=types.UINT8, output_layout="HWC")


def _hue(red: Any, green: Any, blue: Any, high: Any, chroma: Any) -> Any:
    """(hue - 2) * chroma, int16, for a hue of -1 to 5: -3 to 3 times chroma."""
    r, g, b = _int16(red), _int16(green), _int16(blue)
    twice = _int16(chroma, 2.0)
    is_blue, is_green, is_red = r - g + twice, b - r, g - b - twice
    # No `where` in DALI's arithmetic.
    hue = is_blue + (green == high) * (is_green - is_blue)
    return hue + (red == high) * (is_red - hue)


def _int16(pixels: Any, factor: Any = 1.0) -> Any:
    """factor * pixels, rounded."""
    from nvidia.dali import fn, types

    return fn.brightness_contrast(pixels, brightness=factor, dtype=types.INT16)


def _only(nodes: Nodes, which: Any, change: Any) -> Any:
    """nodes["images"], changed by change(**nodes) where `which` is true; the others cost nothing.

    What DALI's own `if` is made of, as in `nodes`.
    """
    from nvidia.dali import fn

    conditional: Any = fn._conditional  # type: ignore[attr-defined]  # made at import time
    changed, rest = {}, None
    for name, node in nodes.items():
        changed[name], other = conditional.split(node, predicate=which, _if_stmt=True)
        rest = other if name == "images" else rest
    return conditional.merge(change(**changed), rest, predicate=which)


def grayscale(_: Any, images: Any, inputs: Nodes, __: Shape) -> Any:
    """Put the luma into all three channels, where "on"."""
    return _only({"images": images}, inputs["on"], lambda images: _rgb(_gray(images)))


def blur(_: GaussianBlur, images: Any, inputs: Nodes, __: Shape) -> Any:
    """Blur by a Gaussian; beyond its edge an image is mirrored, the edge itself not repeated."""
    from nvidia.dali import fn

    def change(images: Any, sigma: Any, window: Any) -> Any:
        return fn.gaussian_blur(images, sigma=sigma, window_size=window)

    nodes = {"images": images, "sigma": inputs["sigma"], "window": inputs["window"]}
    return _only(nodes, inputs["on"], change)


def rotate(op: RandomRotation, images: Any, inputs: Nodes, _: Shape) -> Any:
    """Turn images counter-clockwise about the middle."""
    from nvidia.dali import fn, types

    kinds = {"nearest": types.INTERP_NN, "bilinear": types.INTERP_LINEAR}
    return fn.rotate(
        images,
        angle=inputs["angle"],
        keep_size=True,
        fill_value=op.fill,
        interp_type=kinds[op.interpolation],
    )


def erase(op: RandomErasing, images: Any, inputs: Nodes, _: Shape) -> Any:
    """Fill windows with `value`; CHW in and out, any dtype. A window of no size erases nothing."""
    from nvidia.dali import fn

    value = list(op.value) if isinstance(op.value, tuple) else [op.value]
    window = {"anchor": inputs["anchor"], "shape": inputs["shape"]}
    return fn.erase(images, axis_names="HW", fill_value=value, **window)


def apply(op: Apply, images: Any, inputs: Nodes, shape: Shape) -> Any:
    """The user's function. Raises RecipeError if what it gives back is no image of this shape."""
    from nvidia.dali import fn

    _try_out(op, images.device, shape)
    # A function may ignore its draws, but DALI drops an input that nothing uses.
    fn.copy(inputs["draws"], preserve=True)
    size = [shape.height, shape.width, shape.channels]
    changed = _called(op, images, inputs["draws"])
    return _uint8(fn.reshape(changed, shape=size, layout="HWC"))


def _called(op: Apply, images: Any, draws: Any) -> Any:
    changed = op.fn(images, draws)
    if isinstance(changed, type(images)):
        return changed
    raise RecipeError(
        f"{op}: the function returned {changed!r}, wanted the changed images: one DALI node, "
        "uint8, (height, width, channels)."
    )


def _try_out(op: Apply, device: str, shape: Shape) -> None:
    """Run the function on one black image with draws of 0: in the graph itself a function that
    fails would look like samples that don't decode."""
    from nvidia.dali import Pipeline, fn, types

    size = (shape.height, shape.width, shape.channels)
    outer = Pipeline.current()
    trial = Pipeline(
        batch_size=1,
        num_threads=1,
        device_id=outer.device_id,
        prefetch_queue_depth=1,
        exec_dynamic=True,
    )
    with trial:
        images = fn.reshape(fn.zeros(shape=list(size), dtype=types.UINT8), layout="HWC")
        draws = fn.zeros(shape=[op.draws], dtype=types.FLOAT)
        trial.set_outputs(_called(op, images.gpu() if device == "gpu" else images, draws))
    try:
        (changed,) = trial.run()
    except RuntimeError as error:
        if device == "gpu":  # what fails on the CPU is the function, whatever it says
            check_machine(error)
        raise RecipeError(
            f"{op}: the function fails on one image of {size} (height, width, channels): "
            f"{reason_of(error)}."
        ) from error
    got, layout = tuple(changed[0].shape()), changed.layout()
    if got != size or layout not in ("HWC", ""):
        raise RecipeError(
            f"{op}: the function made {got} in layout {layout!r} of {size}, wanted the same shape, "
            'in layout "HWC". Put what crops and resizes into the recipe.'
        )
