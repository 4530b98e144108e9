"""Define the DALI operators of a checked recipe.

Pipeline definitions call these functions; they only connect DALI's nodes.

Measured with DALI 2.4 on the CPU: each arithmetic operator is a pass over memory of its own, not a
part of a fused expression, so int16 takes half as long as float32; rounding float32 to uint8 takes
1.1 ms for an image of 224 x 224, int16 to uint8 0.3, and uint8 times a factor to int16 0.1.

In a learnt policy (`policies`) each sample passes only the operators of its own operation: a round
splits the batch by kind in a binary tree and merges it again, without copying pixels. Milliseconds
of a core for a 224 x 224 image (DALI 2.4, CPU): color 2.0, autocontrast 0.9, affine and solarize
0.5, the others 0.1 to 0.2. Casting float pixels to uint8 is slow, 1.7 in fn.cast, so contrast and
autocontrast use operators that cast internally. Blending with the grey image by arithmetic is no
faster than fn.saturation.

Differences of a policy's pixels from torchvision's on Pillow images, in units of 0..255:
- affine: nearest neighbours at float32 points, Pillow's at 16.16 fixed point: at most 1 % of the
  pixels come from the neighbour.
- brightness, contrast, color, autocontrast: rounded, torchvision truncates: by 1 at most (color 2,
  since Pillow also rounds the grey image).
- sharpness: by 1 at most, except for the outermost pixels, which torchvision doesn't change; this
  filter mirrors the image at its edge.
- equalize is OpenCV's: level v becomes 255 (c(v) - c(first)) / (n - c(first)), c counting pixels up
  to v, whereas Pillow counts those below v and steps in whole pixels: on photographs by 2 on
  average, and by more if few levels have most pixels.
- posterize, solarize, invert: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from penstock.augment import resample_operator
from penstock.augment.dali_library import new_pipeline
from penstock.augment.decode_failures import check_machine, reason_of
from penstock.augment.draws import (
    DRAW_RULES,
    argument_inputs,
    decodes_window,
    drawn_operations,
    input_names,
    resizes_region,
)
from penstock.augment.operations import (
    Apply,
    AutoAugment,
    ColorJitter,
    GaussianBlur,
    RandAugment,
    RandomErasing,
    RandomGrayscale,
    RandomRotation,
    TrivialAugmentWide,
)
from penstock.augment.policies import KINDS, round_count
from penstock.augment.recipe import Mirror
from penstock.cache import RecipeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.augment.operations import DType
    from penstock.augment.policies import Policy
    from penstock.augment.recipe import CheckedRecipe, GeometryStage, ImageShape, PlacedOperation

    Nodes = dict[str, Any]
    OperationNode = Callable[[Any, Any, dict[str, Any], ImageShape], Any]

_SEXTANTS = (5.0, 3.0, 1.0)  # of red, green and blue on the circle of hues, whose length is 6


def jitter(_: ColorJitter, images: Any, inputs: Nodes, shape: ImageShape) -> Any:
    """Adjust brightness, contrast, saturation and hue as torchvision, in this order."""
    from nvidia.dali import fn

    if (factor := inputs.get("brightness")) is not None:
        images = fn.brightness_contrast(images, brightness=factor)
    if (factor := inputs.get("contrast")) is not None:
        gray = luma(images) if shape.channels == 3 else images
        images = contrast(images, factor, gray)
    if (factor := inputs.get("saturation")) is not None:
        gray = _rgb(luma(images))
        # The factors have opposite signs, or are small: the sum can't overflow.
        images = _uint8(_int16(images, factor) + _int16(gray, 1.0 - factor))
    if (shift := inputs.get("hue")) is not None:
        images = _shift_hue(images, shift, shape)
    return images


def contrast(images: Any, factor: Any, gray: Any, *, arithmetic: bool | None = None) -> Any:
    """Blend with the mean of the grey image, or away from it. factor: on the CPU.

    arithmetic: compute with arithmetic operators; None: if the images are on the GPU. Arguments of
    other operators come from the CPU, so with an argument computed from pixels on the GPU the host
    would wait for the device in each batch.
    """
    from nvidia.dali import fn

    if arithmetic or (arithmetic is None and images.device == "gpu"):
        factor = _on_their_device(images, factor)
        middle = fn.reductions.mean(gray, axes=[0, 1], keep_dims=True)
        return _uint8(images * factor + middle * (1 - factor))
    middle = fn.reductions.mean(gray)
    return fn.brightness_contrast(images, contrast=factor, contrast_center=middle)


def luma(images: Any) -> Any:
    """Return the luma, one channel: 0.299 R + 0.587 G + 0.114 B."""
    from nvidia.dali import fn, types

    return fn.color_space_conversion(images, image_type=types.RGB, output_type=types.GRAY)


def _rgb(gray: Any) -> Any:
    from nvidia.dali import fn, types

    return fn.color_space_conversion(gray, image_type=types.GRAY, output_type=types.RGB)


def _uint8(images: Any) -> Any:
    """Return pixels that are rounded and clipped to 0..255."""
    from nvidia.dali import fn, types

    return fn.cast(images, dtype=types.UINT8)


def _shift_hue(images: Any, shift: Any, shape: ImageShape) -> Any:
    """Add to the hue in HSV (1 is the full circle), exact to rounding. DALI's own hue operator
    rotates the colours in YIQ, which changes value and saturation.

    With c = max - min and a hue H on a circle of length 6, a channel is
    max - c * clamp(|distance of H + n from 3 on the circle| - 1, 0, 1); everything is computed
    times c, so that no division is needed and int16 is enough.
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
    """Return (hue - 2) * chroma, int16, for a hue of -1 to 5: -3 to 3 times chroma."""
    r, g, b = _int16(red), _int16(green), _int16(blue)
    twice = _int16(chroma, 2.0)
    is_blue, is_green, is_red = r - g + twice, b - r, g - b - twice
    # DALI's arithmetic has no `where`.
    hue = is_blue + (green == high) * (is_green - is_blue)
    return hue + (red == high) * (is_red - hue)


def _int16(pixels: Any, factor: Any = 1.0) -> Any:
    """Return factor * pixels, rounded."""
    from nvidia.dali import fn, types

    return fn.brightness_contrast(pixels, brightness=factor, dtype=types.INT16)


def _if_else(
    nodes: Nodes, predicate: Any, then: Callable[[Nodes], Any], other: Callable[[Nodes], Any]
) -> Any:
    """Return then(nodes) for samples for which `predicate` is true, and other(nodes) for the rest.

    It splits and merges batches as DALI's own `if`, without copying pixels.
    """
    from nvidia.dali import fn

    conditional: Any = fn._conditional  # type: ignore[attr-defined]  # made at import time
    true, false = {}, {}
    for name, node in nodes.items():
        true[name], false[name] = conditional.split(node, predicate=predicate, _if_stmt=True)
    return conditional.merge(then(true), other(false), predicate=predicate)


def _images(nodes: Nodes) -> Any:
    return nodes["images"]


def grayscale(_: Any, images: Any, inputs: Nodes, __: ImageShape) -> Any:
    """Put the luma into all three channels of images that are "on"."""
    nodes = {"images": images}
    return _if_else(nodes, inputs["on"], lambda nodes: _rgb(luma(nodes["images"])), _images)


def blur(_: GaussianBlur, images: Any, inputs: Nodes, __: ImageShape) -> Any:
    """Blur by a Gaussian; the image is mirrored at its edge without repeating the edge."""
    from nvidia.dali import fn

    def change(nodes: Nodes) -> Any:
        return fn.gaussian_blur(nodes["images"], sigma=nodes["sigma"], window_size=nodes["window"])

    nodes = {"images": images, "sigma": inputs["sigma"], "window": inputs["window"]}
    return _if_else(nodes, inputs["on"], change, _images)


def rotate(op: RandomRotation, images: Any, inputs: Nodes, _: ImageShape) -> Any:
    """Rotate images counter-clockwise about the middle."""
    from nvidia.dali import fn, types

    kinds = {"nearest": types.INTERP_NN, "bilinear": types.INTERP_LINEAR}
    return fn.rotate(
        images,
        angle=inputs["angle"],
        keep_size=True,
        fill_value=op.fill,
        interp_type=kinds[op.interpolation],
    )


def erase(op: RandomErasing, images: Any, inputs: Nodes, _: ImageShape) -> Any:
    """Fill windows with `value`; CHW in and out, any dtype. A window of no size erases nothing."""
    from nvidia.dali import fn

    value = list(op.value) if isinstance(op.value, tuple) else [op.value]
    window = {"anchor": inputs["anchor"], "shape": inputs["shape"]}
    return fn.erase(images, axis_names="HW", fill_value=value, **window)


def apply_function(op: Apply, images: Any, inputs: Nodes, shape: ImageShape) -> Any:
    """Apply the user's function. Raises RecipeError unless it returns images of this shape."""
    from nvidia.dali import fn

    _try_function(op, images.device, shape)
    # The function may ignore its draws, but DALI drops unused inputs.
    fn.copy(inputs["draws"], preserve=True)
    size = [shape.height, shape.width, shape.channels]
    changed = _call_function(op, images, inputs["draws"])
    return _uint8(fn.reshape(changed, shape=size, layout="HWC"))


def _call_function(op: Apply, images: Any, draws: Any) -> Any:
    changed = op.fn(images, draws)
    if isinstance(changed, type(images)):
        return changed
    raise RecipeError(
        f"{op}: the function returned {changed!r}, wanted the changed images: one DALI node, "
        "uint8, (height, width, channels)."
    )


def _try_function(op: Apply, device: str, shape: ImageShape) -> None:
    """Run the function on one black image with draws of 0. In the graph itself a failing function
    would look like samples that don't decode."""
    from nvidia.dali import Pipeline, fn, types

    size = (shape.height, shape.width, shape.channels)
    trial = new_pipeline(1, threads=1, device_id=Pipeline.current().device_id)
    with trial:
        images = fn.reshape(fn.zeros(shape=list(size), dtype=types.UINT8), layout="HWC")
        draws = fn.zeros(shape=[op.draws], dtype=types.FLOAT)
        trial.set_outputs(_call_function(op, images.gpu() if device == "gpu" else images, draws))
    try:
        (changed,) = trial.run()
    except RuntimeError as error:
        if device == "gpu":  # on the CPU the function fails, whatever the message
            check_machine(error)
        raise RecipeError(
            f"{op}: the function fails on one image of {size} (height, width, channels): "
            f"{reason_of(error)}."
        ) from error
    got, layout = tuple(changed[0].shape()), changed.layout()
    if got != size or layout not in ("HWC", ""):
        raise RecipeError(
            f"{op}: the function returned {got} in layout {layout!r} for {size}, wanted the same "
            'shape, in layout "HWC". Put operations that crop and resize into the recipe.'
        )


_MAX_LEVEL = 255


def apply_policy(op: Policy, images: Any, inputs: Mapping[str, Any]) -> Any:
    """Apply a policy to images: uint8, HWC, RGB, in and out, on their device.

    inputs: nodes on the CPU by the suffixes of `policies.policy_inputs`.
    """
    for number in range(round_count(op)):
        arguments = {name: inputs[f"{name}{number}"] for name in ("kind", "matrix", "value")}
        images = _split_by_kind({"images": images, **arguments}, 0, len(KINDS), fill=op.fill or 0.0)
    return images


def _split_by_kind(nodes: dict[str, Any], low: int, high: int, *, fill: float) -> Any:
    """Apply to each sample its operation, which is one of KINDS[low:high]."""
    if high - low == 1:
        return _policy_operation(KINDS[low], nodes, fill)
    middle = (low + high) // 2
    return _if_else(
        nodes,
        nodes["kind"] < middle,
        lambda nodes: _split_by_kind(nodes, low, middle, fill=fill),
        lambda nodes: _split_by_kind(nodes, middle, high, fill=fill),
    )


def _policy_operation(kind: str, nodes: dict[str, Any], fill: float) -> Any:
    from nvidia.dali import fn, types

    images, value = nodes["images"], nodes["value"]
    if kind == "identity":
        return images
    if kind == "affine":
        options = {"fill_value": fill, "interp_type": types.INTERP_NN}
        return fn.warp_affine(images, matrix=nodes["matrix"], **options)
    if kind == "brightness":
        return fn.brightness_contrast(images, brightness=value)
    if kind == "contrast":
        return contrast(images, value, luma(images))
    if kind == "color":  # towards, or away from, the grey image
        return fn.saturation(images, saturation=value)
    if kind == "equalize":
        return fn.equalize(images)
    if kind == "posterize":
        return images & _level(images, value)
    if kind == "autocontrast":
        return autocontrast(images)
    return {"sharpness": _sharpness, "solarize": _solarize}[kind](images, value)


def _sharpness(images: Any, factor: Any) -> Any:
    """Blend with the image smoothed by [1 1 1; 1 5 1; 1 1 1] / 13, or away from it."""
    from nvidia.dali import fn

    # From numbers, since an array has the batch size, and this is a part of the batch.
    around = (1 - factor) / 13.0
    middle = factor + 5 * around
    kernel = fn.reshape(fn.stack(*[around] * 4, middle, *[around] * 4), shape=[3, 3])
    return fn.filter(images, _on_their_device(images, kernel))


def _solarize(images: Any, threshold: Any) -> Any:
    """Replace values x of at least the threshold by 255 - x, which is x ^ 255."""
    from nvidia.dali import types

    bright = images >= _level(images, threshold)
    return images ^ (bright * types.Constant(_MAX_LEVEL, dtype=types.UINT8))


def autocontrast(images: Any, *, arithmetic: bool | None = None) -> Any:
    """Stretch each channel to 0..255; a channel of a single level isn't changed. arithmetic: as in
    `contrast`."""
    from nvidia.dali import fn, types

    low = fn.reductions.min(images, axes=[0, 1], keep_dims=True)
    spread = fn.reductions.max(images, axes=[0, 1], keep_dims=True) - low
    full = types.Constant(_MAX_LEVEL, dtype=types.UINT8)
    # DALI's arithmetic has no `if`: 0 and 255 for a single level.
    low, spread = low * (spread > 0), spread + (spread == 0) * full
    if arithmetic or (arithmetic is None and images.device == "gpu"):
        return _uint8((images - low) * (types.Constant(float(_MAX_LEVEL)) / spread))
    low, spread = (fn.cast(node, dtype=types.FLOAT) for node in (low, spread))
    return fn.normalize(
        images, axes=[0, 1], mean=low, stddev=spread, scale=float(_MAX_LEVEL), dtype=types.UINT8
    )


def _level(images: Any, value: Any) -> Any:
    """Return one number per sample as uint8, on the device of the images."""
    from nvidia.dali import fn, types

    return _on_their_device(images, fn.cast(value, dtype=types.UINT8))


def _on_their_device(images: Any, node: Any) -> Any:
    """Return a node's copy on the images' device."""
    return node.gpu() if images.device == "gpu" else node


def operation_node(
    operation: PlacedOperation | Mirror, images: Any, inputs: dict[str, Any], shape: ImageShape
) -> Any:
    """Apply an operation to images. inputs: the inputs of the whole graph, by name."""
    if isinstance(operation, Mirror):
        from nvidia.dali import fn

        mirror = inputs[operation.name]
        horizontal, vertical = (0, mirror) if operation.vertical else (mirror, 0)
        return fn.flip(images, horizontal=horizontal, vertical=vertical)
    op = operation.op
    own = {
        suffix: inputs[operation.name(suffix)] for suffix, _, _ in DRAW_RULES[type(op)].inputs(op)
    }
    return OPERATION_NODES[type(op)](op, images, own, shape)


def _policy(op: Any, images: Any, inputs: dict[str, Any], _: ImageShape) -> Any:
    return apply_policy(op, images, inputs)


# To add an operation, see `operations.PixelOperation`.
OPERATION_NODES: dict[type, OperationNode] = {
    ColorJitter: jitter,
    RandomGrayscale: grayscale,
    GaussianBlur: blur,
    RandomRotation: rotate,
    RandAugment: _policy,
    TrivialAugmentWide: _policy,
    AutoAugment: _policy,
    Apply: apply_function,
    RandomErasing: erase,
}
"""The function of each type of operation: from (operation, images, its inputs by suffix, shape) to
images, uint8, HWC in and out (RandomErasing: CHW, in the batch's dtype)."""

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """The checked arguments of a `Graph`, from which its pipeline is built.

    pixels: samples are already decoded: RGB, uint8, shape (height, width, 3). resident: they were
    decoded by `define_full_decode`. compiled: resize on the CPU by `resample_kernels`. windows:
    "decoder" decodes only the windows, "slice" crops them from full images.
    """

    recipe: CheckedRecipe
    batch_size: int
    threads: int
    device: Device
    device_id: int | None
    deterministic: bool
    check_headers: bool
    constant: bool
    pixels: bool = False
    compiled: bool = False
    resident: bool = False
    windows: Literal["decoder", "slice"] = "decoder"


def define_outputs(plan: GraphPlan) -> tuple[Any, ...]:
    """Return the pipeline's outputs; called inside its definition."""
    from nvidia.dali import fn, types

    def source(name: str, dtype: Any, ndim: int) -> Any:
        return fn.external_source(name=name, no_copy=True, dtype=dtype, ndim=ndim)

    if plan.pixels:
        encoded: Any = fn.external_source(
            name="encoded",
            no_copy=True,
            dtype=types.UINT8,
            ndim=3,
            layout="HWC",
            device="gpu" if plan.resident and plan.device == "cuda" else "cpu",
        )
    else:
        encoded = source("encoded", types.UINT8, 1)
    kinds = {"start": (types.INT32, 1), "shape": (types.INT32, 1)}
    kinds |= {f"filter{k}": (types.BOOL, 0) for k in range(len(plan.recipe.geometries))}
    for each in ("anchor", "extent"):
        kinds |= {f"{each}{k}": (types.INT32, 1) for k in range(len(plan.recipe.geometries))}
    dtypes = {"int32": types.INT32, "float32": types.FLOAT, "bool": types.BOOL}
    for operation in drawn_operations(plan.recipe):
        kinds |= {name: (dtypes[dtype], ndim) for name, dtype, ndim in argument_inputs(operation)}
    inputs = {
        name: source(name, *kinds.get(name, (types.FLOAT, 1))) for name in input_names(plan.recipe)
    }
    if plan.constant:  # DALI's smallest outputs, with every input in use
        return (encoded.shape(), *inputs.values())
    images = (_from_pixels if plan.pixels else _from_encoded)(plan, encoded, inputs)
    last = len(plan.recipe.geometries) - 1
    one_pass = _is_one_pass(plan)
    for number, geometry in enumerate(plan.recipe.geometries):
        if geometry.padding is not None:  # a window that may reach outside the image
            window = inputs[f"anchor{number}"], inputs[f"extent{number}"]
            fill: Any = {"out_of_bounds_policy": "pad", "fill_values": [geometry.padding.fill]}
            images = fn.slice(images, *window, axes=[0, 1], **fill)
        if geometry.size is not None:
            to_the_end = one_pass and number == last
            images = _resized(plan, images, number, inputs, to_the_end=to_the_end)
    for operation in plan.recipe.pixels:
        images = operation_node(operation, images, inputs, plan.recipe.image)
    if not one_pass:
        images = _last_pass(plan.recipe, images, inputs)
    for erasing in plan.recipe.erasing:
        images = operation_node(erasing, images, inputs, plan.recipe.image)
    if plan.recipe.dtype != last_pass_dtype(plan.recipe):
        images = fn.cast(images, dtype=_dali_dtype(plan.recipe.dtype))
    return (images,)


def last_pass_dtype(recipe: CheckedRecipe) -> DType:
    """Return the dtype of the images after the last pass: DALI's Erase doesn't support float16 on
    the GPU, so images are cast to it afterwards."""
    return "float32" if recipe.erasing and recipe.dtype == "float16" else recipe.dtype


def _from_pixels(plan: GraphPlan, images: Any, inputs: dict[str, Any]) -> Any:
    """Return the window of decoded images, on the device and in the recipe's colours."""
    from nvidia.dali import fn, types

    if plan.device == "cuda" and not plan.resident:
        images = images.gpu()
    if decodes_window(plan.recipe):
        images = fn.slice(images, inputs["start"], inputs["shape"], axes=[0, 1])
    if plan.recipe.decode.color == "gray" and not plan.resident:
        colours = {"image_type": types.RGB, "output_type": types.GRAY}
        images = fn.color_space_conversion(images, **colours)
    return images


def define_full_decode(plan: GraphPlan) -> Any:
    """Return full images, upright and in the recipe's colours, HWC. Called inside a pipeline
    definition."""
    from nvidia.dali import fn, types

    encoded = fn.external_source(name="encoded", no_copy=True, dtype=types.UINT8, ndim=1)
    return fn.decoders.image(encoded, **decode_options(plan))


def _from_encoded(plan: GraphPlan, encoded: Any, inputs: dict[str, Any]) -> Any:
    """Decode upright images, HWC; only the window if the recipe has one."""
    from nvidia.dali import fn

    options = decode_options(plan)
    if not decodes_window(plan.recipe):
        return fn.decoders.image(encoded, **options)
    window = {"start": inputs["start"], "shape": inputs["shape"], "axes": [0, 1]}
    if plan.windows == "slice":
        return fn.slice(fn.decoders.image(encoded, **options), **window)
    return fn.decoders.image_slice(encoded, **window, **options)


def decode_options(plan: GraphPlan) -> dict[str, Any]:
    """Return the arguments of DALI's decoders."""
    from nvidia.dali import types

    # Never ANY_DATA: on the CPU it corrupts the heap on a grey JPEG (DALI 2.4).
    gray = plan.recipe.decode.color == "gray"
    options: dict[str, Any] = {
        "output_type": types.GRAY if gray else types.RGB,
        "adjust_orientation": True,  # the windows are in upright coordinates
    }
    if plan.device == "cuda":
        decode = plan.recipe.decode
        options["device"] = "mixed"
        if decode.hw_decoder_load is not None:
            options["hw_decoder_load"] = decode.hw_decoder_load
        if decode.preallocate is not None:
            height, width = decode.preallocate
            options |= {"preallocate_height_hint": height, "preallocate_width_hint": width}
        if plan.deterministic:
            # One decoder for all, with the CPU's chroma upsampling.
            options |= {"hw_decoder_load": 0.0, "jpeg_fancy_upsampling": True}
    return options


def _is_one_pass(plan: GraphPlan) -> bool:
    """Return True if one compiled pass does the last resize, the flip, Normalize and HWC to CHW."""
    recipe = plan.recipe
    last = recipe.geometries[-1]
    has_room = resample_operator.fits_planes(recipe.shape)
    return _is_compiled(plan, last) and recipe.dtype != "uint8" and not recipe.pixels and has_room


def _is_compiled(plan: GraphPlan, geometry: GeometryStage) -> bool:
    fixed = geometry.size is not None and geometry.out is not None
    return fixed and plan.compiled and plan.device == "cpu"


def _resized(
    plan: GraphPlan, images: Any, number: int, inputs: dict[str, Any], *, to_the_end: bool
) -> Any:
    """Resize images by the geometry of a number. to_the_end: flip, normalise and turn to CHW,
    too."""
    from nvidia.dali import fn, types

    recipe, geometry = plan.recipe, plan.recipe.geometries[number]
    if not _is_compiled(plan, geometry):
        return _resized_by_dali(images, geometry, number, inputs)
    assert geometry.out is not None
    region = (inputs[f"low{number}"], inputs[f"high{number}"]) if resizes_region(geometry) else None
    filtered = inputs[f"filter{number}"] if geometry.antialias == "auto" else geometry.antialias
    if not to_the_end:
        shape = (*geometry.out, recipe.decode.channels)
        return resample_operator.resize_to_pixels(images, shape, region=region, filtered=filtered)
    images = resample_operator.resize_to_planes(
        images,
        recipe.shape,
        region=region,
        filtered=filtered,
        mirror=inputs[recipe.mirror.name] if recipe.mirror else None,
        normalize=recipe.normalize,
    )
    if recipe.erasing:  # it needs names of axes, which numba's output doesn't have
        images = fn.reshape(images, layout="CHW")
    if last_pass_dtype(recipe) == "float16":
        images = fn.cast(images, dtype=types.FLOAT16)
    return images


def _resized_by_dali(
    images: Any, geometry: GeometryStage, number: int, inputs: dict[str, Any]
) -> Any:
    from nvidia.dali import fn, types

    names = {} if geometry.out else {"size": f"size{number}"}
    if resizes_region(geometry):
        names |= {"roi_start": f"low{number}", "roi_end": f"high{number}"}

    def resize(images: Any, arguments: dict[str, Any], *, antialias: bool) -> Any:
        fixed = {"size": list(geometry.out)} if geometry.out else {}
        options = {"interp_type": types.INTERP_LINEAR, "antialias": antialias, **fixed}
        return fn.resize(images, **options, **arguments)

    arguments = {option: inputs[name] for option, name in names.items()}
    if geometry.antialias != "auto":
        return resize(images, arguments, antialias=geometry.antialias)
    return _if_else(
        {"images": images, **arguments},
        inputs[f"filter{number}"],
        lambda nodes: resize(nodes.pop("images"), nodes, antialias=True),
        lambda nodes: resize(nodes.pop("images"), nodes, antialias=False),
    )


def _last_pass(recipe: CheckedRecipe, images: Any, inputs: dict[str, Any]) -> Any:
    """Flip, normalise, cast and HWC to CHW in one pass."""
    from nvidia.dali import fn

    options: dict[str, Any] = {
        "dtype": _dali_dtype(last_pass_dtype(recipe)),
        "output_layout": "CHW",
    }
    if recipe.mirror:
        options["mirror"] = inputs[recipe.mirror.name]
    if recipe.normalize:  # in units of 0..1; pixels come as 0..255
        options["mean"] = [255 * mean for mean in recipe.normalize.mean]
        options["std"] = [255 * std for std in recipe.normalize.std]
    return fn.crop_mirror_normalize(images, **options)


def _dali_dtype(name: DType) -> Any:
    from nvidia.dali import types

    return {"float32": types.FLOAT, "float16": types.FLOAT16, "uint8": types.UINT8}[name]
