"""A checked recipe as DALI operators. Called inside a pipeline's definition; nothing runs here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from penstock.augment import resample_node
from penstock.augment.draws import decodes_window, drawn_operations, input_names, resizes_region
from penstock.augment.operation_nodes import operation_node
from penstock.augment.pixel_draws import argument_inputs

if TYPE_CHECKING:
    from penstock.augment.geometry import Geometry
    from penstock.augment.ops import DType
    from penstock.augment.recipe import CheckedRecipe

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """All that a DALI pipeline is built from; the Graph's arguments, checked. pixels: samples come
    decoded, RGB, uint8 of shape (height, width, 3); resident: as `describe_whole` decodes them.
    compiled: resize on the CPU by `resample_kernels`. windows: "decoder" decodes them alone,
    "slice" crops them out of whole images."""

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


def describe(plan: GraphPlan) -> tuple[Any, ...]:
    """The pipeline's outputs; called inside its definition."""
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
    if plan.constant:  # as small as DALI's outputs get, and every input is used
        return (encoded.shape(), *inputs.values())
    images = (_from_pixels if plan.pixels else _from_encoded)(plan, encoded, inputs)
    last = len(plan.recipe.geometries) - 1
    one_pass = _is_one_pass(plan)
    for number, geometry in enumerate(plan.recipe.geometries):
        if geometry.padding is not None:
            images = _padded(images, number, inputs, geometry.padding.fill)
        if geometry.size is not None:
            to_the_end = one_pass and number == last
            images = _resized(plan, images, number, inputs, to_the_end=to_the_end)
    for operation in plan.recipe.pixels:
        images = operation_node(operation, images, inputs, plan.recipe.image)
    if not one_pass:
        images = _finished(plan.recipe, images, inputs)
    for erasing in plan.recipe.erasing:
        images = operation_node(erasing, images, inputs, plan.recipe.image)
    if plan.recipe.dtype != finished_dtype(plan.recipe):
        images = fn.cast(images, dtype=_dali_dtype(plan.recipe.dtype))
    return (images,)


def finished_dtype(recipe: CheckedRecipe) -> DType:
    """The dtype of the images behind the last pass: on the GPU DALI's Erase knows no float16, so
    what is erased becomes that behind it."""
    return "float32" if recipe.erasing and recipe.dtype == "float16" else recipe.dtype


def _from_pixels(plan: GraphPlan, images: Any, inputs: dict[str, Any]) -> Any:
    """Pixels that came decoded: on the device, in the recipe's colours, and only the window."""
    from nvidia.dali import fn, types

    if plan.device == "cuda" and not plan.resident:
        images = images.gpu()
    if decodes_window(plan.recipe):
        images = fn.slice(images, inputs["start"], inputs["shape"], axes=[0, 1])
    if plan.recipe.decode.color == "gray" and not plan.resident:
        colours = {"image_type": types.RGB, "output_type": types.GRAY}
        images = fn.color_space_conversion(images, **colours)
    return images


def describe_whole(plan: GraphPlan) -> Any:
    """Whole images, upright and in the recipe's colours, HWC; called inside a definition."""
    from nvidia.dali import fn, types

    encoded = fn.external_source(name="encoded", no_copy=True, dtype=types.UINT8, ndim=1)
    return fn.decoders.image(encoded, **_decode_options(plan))


def _from_encoded(plan: GraphPlan, encoded: Any, inputs: dict[str, Any]) -> Any:
    """Upright pixels, HWC; only the window where there is one."""
    from nvidia.dali import fn

    options = _decode_options(plan)
    if not decodes_window(plan.recipe):
        return fn.decoders.image(encoded, **options)
    window = {"start": inputs["start"], "shape": inputs["shape"], "axes": [0, 1]}
    if plan.windows == "slice":
        return fn.slice(fn.decoders.image(encoded, **options), **window)
    return fn.decoders.image_slice(encoded, **window, **options)


def _decode_options(plan: GraphPlan) -> dict[str, Any]:
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
            # All by one decoder, and then with the CPU's chroma upsampling, as it costs nothing
            # that the hardware decoder would have saved.
            options |= {"hw_decoder_load": 0.0, "jpeg_fancy_upsampling": True}
    return options


def _is_one_pass(plan: GraphPlan) -> bool:
    """Whether the last resize, the flip, Normalize and HWC to CHW are one compiled pass."""
    recipe = plan.recipe
    last = recipe.geometries[-1]
    has_room = resample_node.fits(recipe.shape)
    return _is_compiled(plan, last) and recipe.dtype != "uint8" and not recipe.pixels and has_room


def _is_compiled(plan: GraphPlan, geometry: Geometry) -> bool:
    fixed = geometry.size is not None and geometry.out is not None
    return fixed and plan.compiled and plan.device == "cpu"


def _resized(
    plan: GraphPlan, images: Any, number: int, inputs: dict[str, Any], *, to_the_end: bool
) -> Any:
    """to_the_end: flipped, normalised and CHW too."""
    from nvidia.dali import fn, types

    recipe, geometry = plan.recipe, plan.recipe.geometries[number]
    if not _is_compiled(plan, geometry):
        return _resized_by_dali(images, geometry, number, inputs)
    assert geometry.out is not None
    region = (inputs[f"low{number}"], inputs[f"high{number}"]) if resizes_region(geometry) else None
    filtered = inputs[f"filter{number}"] if geometry.antialias == "auto" else geometry.antialias
    if not to_the_end:
        shape = (*geometry.out, recipe.decode.channels)
        return resample_node.pixels(images, shape, region=region, filtered=filtered)
    images = resample_node.planes(
        images,
        recipe.shape,
        region=region,
        filtered=filtered,
        mirror=inputs[recipe.mirror.name] if recipe.mirror else None,
        normalize=recipe.normalize,
    )
    if recipe.erasing:  # which asks for the axes by name; what numba gives has none
        images = fn.reshape(images, layout="CHW")
    if finished_dtype(recipe) == "float16":
        images = fn.cast(images, dtype=types.FLOAT16)
    return images


def _resized_by_dali(images: Any, geometry: Geometry, number: int, inputs: dict[str, Any]) -> Any:
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
    # What DALI's own `if` is made of; splitting and merging hand pixels on without a copy.
    which = inputs[f"filter{number}"]
    conditional: Any = fn._conditional  # type: ignore[attr-defined]  # made at import time
    filtered, plain = {}, {}
    for option, node in {"images": images, **arguments}.items():
        filtered[option], plain[option] = conditional.split(node, predicate=which, _if_stmt=True)
    return conditional.merge(
        resize(filtered.pop("images"), filtered, antialias=True),
        resize(plain.pop("images"), plain, antialias=False),
        predicate=which,
    )


def _padded(images: Any, number: int, inputs: dict[str, Any], fill: float) -> Any:
    """A window that may reach outside of an image."""
    from nvidia.dali import fn

    return fn.slice(
        images,
        inputs[f"anchor{number}"],
        inputs[f"extent{number}"],
        axes=[0, 1],
        out_of_bounds_policy="pad",
        fill_values=[fill],
    )


def _finished(recipe: CheckedRecipe, images: Any, inputs: dict[str, Any]) -> Any:
    """Flip, normalise, cast and HWC to CHW in one pass."""
    from nvidia.dali import fn

    options: dict[str, Any] = {"dtype": _dali_dtype(finished_dtype(recipe)), "output_layout": "CHW"}
    if recipe.mirror:
        options["mirror"] = inputs[recipe.mirror.name]
    if recipe.normalize:  # in units of 0..1; pixels come as 0..255
        options["mean"] = [255 * mean for mean in recipe.normalize.mean]
        options["std"] = [255 * std for std in recipe.normalize.std]
    return fn.crop_mirror_normalize(images, **options)


def _dali_dtype(name: DType) -> Any:
    from nvidia.dali import types

    return {"float32": types.FLOAT, "float16": types.FLOAT16, "uint8": types.UINT8}[name]
