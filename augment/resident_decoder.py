"""Decode full images, upright and in a recipe's colours, to keep them in memory.

The decoder has the graph's own options, so that a window of its output has the same bits as the
same window decoded by the graph (on the CPU; measured with DALI 2.4, and checked by a test).
Samples are decoded in runs, two of them in flight: one is copied while the next is decoded, and
memory in flight is bounded for batches of any size.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from penstock.augment.dali_library import RUN_SAMPLES, EncodedPipeline, decode_runs, load_dali
from penstock.augment.decode_failures import check_machine
from penstock.augment.devices import checked_device
from penstock.augment.graph_definition import GraphPlan, decoded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.augment.recipe import CheckedRecipe
    from penstock.readers import Encoded

RUNS_IN_FLIGHT = 2
HELD_RUNS = 1  # runs whose memory returns to DALI after the copies of their images are complete


class FullImageDecoder:
    """A decoder of samples whose headers were checked (see `graph`). One thread calls it.

    threads: CPU threads that decode. The other arguments and errors are those of `Graph`.
    """

    def __init__(
        self,
        recipe: CheckedRecipe,
        *,
        threads: int,
        device: str = "cpu",
        device_id: int | None = None,
        deterministic: bool = False,
    ) -> None:
        number = checked_device(device, device_id)
        plan = GraphPlan(
            recipe=recipe,
            batch_size=RUN_SAMPLES,
            threads=threads,
            device_id=number,
            deterministic=deterministic,
        )
        self.pipeline = EncodedPipeline(
            lambda encoded: [decoded(plan, encoded)],
            batch_size=RUN_SAMPLES,
            threads=threads,
            device_id=number,
        )

    def __call__(
        self, samples: Sequence[Encoded], pixels: Sequence[int]
    ) -> Iterator[list[tuple[int, Any]]]:
        """Yield runs of (row, image) of the samples that decode, in any order.

        pixels: height times width of each sample. An image is a torch tensor on the device, uint8,
        shape (height, width, channels), valid until the next run. The caller must consume all runs
        before the next call. Raises DeviceError if memory is short or the device fails.
        """
        failed: list[int] = []
        flying: deque[tuple[list[int], Any]] = deque()
        for run in decode_runs(pixels):
            flying.append((run, self.pipeline.schedule([samples[row] for row in run])))
            if len(flying) == RUNS_IN_FLIGHT:
                yield from self._taken(flying.popleft()[0], failed)
        while flying:
            yield from self._taken(flying.popleft()[0], failed)
        # One at a time, since a failed run loses its good samples, too.
        for row in failed:
            alone = self.pipeline.schedule([samples[row]])
            yield from self._taken([row], [])
            del alone

    def _taken(self, rows: list[int], failed: list[int]) -> Iterator[list[tuple[int, Any]]]:
        from torch.utils.dlpack import from_dlpack

        try:
            images = self.pipeline.output()
        except RuntimeError as error:
            check_machine(error, remedy="resident=False, or a smaller batch")
            failed += rows
            return
        yield [(row, from_dlpack(images[place])) for place, row in enumerate(rows)]


def resident_tensor(image: Any) -> Any:
    """Return DALI's view of an image in the memory of a GPU, which `Graph(resident=True)` reads.

    image: torch uint8 on CUDA, shape (height, width, channels), contiguous.
    """
    return load_dali().tensors.TensorGPU(image, layout="HWC")
