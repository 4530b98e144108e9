"""List the examples that each command's help ends with.

A test parses all of them and runs those that need neither a store nor minutes.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

EXAMPLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "pack": (
            "penstock pack photos photos-pack",
            "penstock pack photos photos-small --short-side 256 --quality 90",
            "penstock pack s3://bucket/cells.zarr cells-pack --cache cached",
        ),
        "index": (
            "penstock index photos",
            "penstock index photos --out photos-index",
            "penstock index s3://bucket/era5.zarr --out s3://bucket/era5.penstock",
        ),
        "inspect": (
            "penstock inspect photos --index photos-index --json",
            "penstock inspect s3://bucket/gpt --dtype uint16 --sample 2048",
            "penstock inspect photos --batch 8 --augment imagenet --out sheet.png",
        ),
        "warm": (
            "penstock warm s3://bucket/photos-pack --cache cached --dry-run",
            "penstock warm 's3://bucket/web/*.parquet' --cache cached --max-bytes 500GB",
            "penstock warm s3://bucket/photos-pack --cache cached --nodes 4 --node-rank 0",
        ),
        "bench": (
            "penstock bench photos-pack",
            "penstock bench s3://bucket/scan.zarr --sample 8,-,256,256 --cache cached",
            "penstock bench photos --against torch,dali --plot bench.png",
        ),
        "plan": (
            "penstock plan photos-pack --gpus 4 --samples-per-s 1800",
            "penstock plan --model b200-unet3d --nodes 9 --nvme 30TB --json",
            "penstock plan s3://bucket/photos-pack --model resnet50 --plot plan.png",
        ),
        "doctor": (
            "penstock doctor cached",
            "penstock doctor --peer 10.0.0.8:7077 --peer-token-file token",
            "penstock doctor --url s3://bucket/photos -o region=eu-central-1",
        ),
        "cache ls": (
            "penstock cache ls cached",
            "penstock cache ls cached --dataset photos --json",
        ),
        "cache stat": ("penstock cache stat cached",),
        "cache verify": ("penstock cache verify cached",),
        "cache evict": (
            "penstock cache evict cached --to 500GB",
            "penstock cache evict cached --dataset s3://bucket/photos-pack",
        ),
        "cache clear": ("penstock cache clear cached", "penstock cache clear cached --yes"),
        "cache gc": ("penstock cache gc cached",),
    }
)
"""By command. `photos` is an image folder, `cached` a cache folder; pack and index make the rest
before others read it, in this order."""


def epilog(command: str) -> str:
    """Return the examples below the options of a command; typer breaks lines at blank lines."""
    return "\n\n".join(("[bold]Examples[/bold]", *EXAMPLES[command]))


def prose(command: Callable[..., object]) -> str:
    """A command's docstring with each paragraph on one line: help breaks lines by the terminal."""
    paragraphs = (command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(one.split()) for one in paragraphs)
