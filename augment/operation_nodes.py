"""Which DALI nodes carry out each operation behind the windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.augment import pixel_nodes, policy_nodes
from penstock.augment.ops import (
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
from penstock.augment.pixel_draws import ARGUMENTS
from penstock.augment.pixels import Mirror

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.augment.pixels import PlacedOperation, Shape

    Node = Callable[[Any, Any, dict[str, Any], Shape], Any]


def operation_node(
    operation: PlacedOperation | Mirror, images: Any, inputs: dict[str, Any], shape: Shape
) -> Any:
    """The images after an operation. inputs: of the whole graph, by name."""
    if isinstance(operation, Mirror):
        return pixel_nodes.flip(images, inputs[operation.name], vertical=operation.vertical)
    op = operation.op
    own = {
        suffix: inputs[operation.name(suffix)] for suffix, _, _ in ARGUMENTS[type(op)].inputs(op)
    }
    return NODES[type(op)](op, images, own, shape)


def _policy(op: Any, images: Any, inputs: dict[str, Any], _: Shape) -> Any:
    return policy_nodes.policy_nodes(op, images, inputs)


# Where to add an operation: see `ops.Pixel`.
NODES: dict[type, Node] = {
    ColorJitter: pixel_nodes.jitter,
    RandomGrayscale: pixel_nodes.grayscale,
    GaussianBlur: pixel_nodes.blur,
    RandomRotation: pixel_nodes.rotate,
    RandAugment: _policy,
    TrivialAugmentWide: _policy,
    AutoAugment: _policy,
    Apply: pixel_nodes.apply,
    RandomErasing: pixel_nodes.erase,
}
"""The function of each type: (operation, images, its inputs by suffix, shape) to images, uint8 HWC
in and out (RandomErasing: CHW of the batch's dtype)."""
