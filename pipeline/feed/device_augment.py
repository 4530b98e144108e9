"""Copy batches to the device if the CPU decoded them, and run the user's function on them there.

On CUDA both work on a stream of their own, one batch ahead, while the device computes the training
step of the batch before. That stream first waits for all work that is already queued on the loop's
stream, so the function sees all that the program wrote, and the memory of delivered batches is free
when it is used again. At the delivery the loop's stream waits for the function. On the CPU the
function runs in the loop when its batch is due.

The function runs in the training loop's thread, because torchvision's and Kornia's operations draw
from torch's global random state, which all threads share. It is seeded for the call and restored
after it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from penstock.augment import keyed_uniform
from penstock.cache import PlanError, RecipeError
from penstock.cache.base import keyed_hash
from penstock.pipeline.feed.tensors import to_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.feed.batch import Batch
    from penstock.pipeline.options import DeviceFunction
    from penstock.pipeline.plan import Cursor, Delivery, Walk


class DeviceBatch(dict[str, Any]):
    """A batch by field, on its device, as a function for `device_augment=` gets it."""

    _keys: tuple[torch.Tensor, Delivery, int] | None = None

    @classmethod
    def of(cls, batch: Batch, *, device: torch.device, seed: int) -> DeviceBatch:
        """Return a finished batch. seed: of the loader's draws."""
        assert isinstance(batch.output, dict)
        made = cls(batch.output)
        ids = torch.from_numpy(batch.content.ids[: batch.samples].copy())
        delivery = batch.delivery.take(slice(batch.samples))
        made._keys = ids.to(device, non_blocking=True), delivery, seed
        return made

    def uniform(self, n: int) -> torch.Tensor:
        """Return n random numbers in [0, 1) for each sample, float64, shape (samples, n), on the
        batch's device.

        They are those of `penstock.keyed_uniform` with the loader's seed, and with the epoch and
        the occurrence of each sample: the same in any batch, on any rank and after any restart.
        """
        if self._keys is None:
            raise RecipeError(
                "uniform: this batch is a copy without its samples' ids: call the method on the "
                "batch that device_augment= got."
            )
        ids, of, seed = self._keys
        return keyed_uniform(ids, epoch=of.epoch, n=n, seed=seed, occurrences=of.occurrences)


@dataclass(kw_only=True, eq=False)
class DeviceAugment:
    """Copies finished batches to the device, and calls the user's function on them, in the training
    loop's thread.

    function: None only copies. copies: batches are finished on the CPU. rank: of the batches; with
    the seed and the batch's place in the epoch it seeds the generator. is_ahead: it works one batch
    ahead, on CUDA on a stream of its own.
    """

    function: DeviceFunction | None
    device: torch.device
    copies: bool
    seed: int
    rank: int
    walk: Walk
    is_ahead: bool = field(init=False)
    _stream: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.is_ahead, self._is_cuda = self.device.type != "cpu", self.device.type == "cuda"

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Make the function's stream the current one, after what the loop's stream was given."""
        if not self._is_cuda:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def __call__(self, batch: Batch) -> None:
        """Replace the output of a finished batch by a copy on the device, or by what the function
        returns. Raises the function's own errors, with a note that names it and the step."""
        if self.copies:
            batch.output = to_device(batch.output, self.device)
        if self.function is not None:
            self._call(self.function, batch)
        if self._is_cuda:
            batch.ready = self._stream.record_event()

    def _call(self, function: DeviceFunction, batch: Batch) -> None:
        start = batch.step.start
        whole = DeviceBatch.of(batch, device=self.device, seed=self.seed)
        if self._is_cuda and not self.copies:  # DALI frees memory in one stream's order; two use it
            whole.update({name: _copied(value) for name, value in whole.items()})
        key = keyed_hash(self.seed, start.epoch, start.position, self.rank)
        generator = torch.Generator(self.device).manual_seed(int(key) >> 1)
        try:
            with self._seeded(int(keyed_hash(key, 1)) >> 1), torch.no_grad():
                result = function(whole, generator)
            self._check(result, generator)
        except Exception as error:
            error.add_note(f"while device_augment={self.name} was called at {self._place(start)}")
            raise
        batch.output = dict(result) if type(result) is DeviceBatch else result

    def deliver(self, batch: Batch) -> None:
        """Let the loop's stream wait for the function's work on a batch."""
        if batch.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(batch.ready)

    @property
    def name(self) -> str:
        """The name of the function, for messages."""
        function: Any = self.function
        name = getattr(function, "__qualname__", None) or type(function).__qualname__
        return str(name)

    @contextlib.contextmanager
    def _seeded(self, number: int) -> Iterator[None]:
        """Seed torch's global random states inside, and restore them."""
        with torch.random.fork_rng(devices=[self.device] if self._is_cuda else []):
            torch.default_generator.manual_seed(number)
            if self._is_cuda:
                with torch.cuda.device(self.device):
                    torch.cuda.manual_seed(number)
            yield

    def _check(self, result: Any, generator: torch.Generator) -> None:
        if result is None:
            raise RecipeError(
                f"device_augment={self.name} returned None, and the loop would get it as its "
                "batch: return the batch."
            )
        if isinstance(result, tuple) and any(each is generator for each in result):
            raise RecipeError(
                f"device_augment={self.name} returned its generator as a part of the batch: it "
                "takes any number of arguments and returns them all. Pass a function of two: "
                "lambda batch, generator: transform(batch)."
            )

    def _place(self, start: Cursor) -> str:
        with contextlib.suppress(PlanError):  # counting takes too long
            return f"step {self.walk.step_number(start)} (epoch {start.epoch})"
        return f"position {start.position} of epoch {start.epoch}"


def _copied(value: Any) -> Any:
    """Return a copy of a tensor, or of a list's tensors, in memory of torch."""
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value.clone() if isinstance(value, torch.Tensor) else value
