"""Run one rank of a trial job of `benchmarks.cluster`: read, sleep for a step, wait for the others.

torchrun starts it on a host of its own. It writes the ids of every step, and at the end its
measurements.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
import torch.distributed as dist

from penstock import DataLoader, Dataset, DiskCache, Order, Peers, World, concat, warm

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(slots=True)
class Steps:
    """The timed training loop. Its first step is excluded, as in DLIO.

    waits_s: of each step, for its batch. busy_s: all other time of a step.
    """

    step_s: float
    ids: TextIO
    fed: int = 0
    first_wait_s: float = 0.0
    elapsed_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)

    def run(self, batches: Iterable[Any], *, epoch: int) -> Iterable[int]:
        """Make a step of each batch and yield the number of steps so far."""
        began = asked = time.perf_counter()
        for data, id in batches:
            now = time.perf_counter()
            if self.fed == 0:
                began = now
                self.first_wait_s = now - asked
            else:
                self.waits_s.append(now - asked)
            assert len(data) == len(id)
            time.sleep(self.step_s)
            self.ids.write(json.dumps({"epoch": epoch, "ids": id.tolist()}) + "\n")
            dist.all_reduce(torch.zeros(1))
            self.fed += 1
            self.elapsed_s = time.perf_counter() - began - self.step_s
            yield self.fed
            asked = time.perf_counter()

    def report(self) -> dict[str, Any]:
        """Return the measurements: AU in percent, seconds."""
        compute_s = (self.fed - 1) * self.step_s
        return {
            "steps": self.fed,
            "elapsed_s": self.elapsed_s,
            "au": 100 * compute_s / max(1e-9, self.elapsed_s),
            "waited_s": sum(self.waits_s),
            "first_wait_s": self.first_wait_s,
            "slowest_wait_s": max(self.waits_s, default=0.0),
        }


def main() -> None:
    """Train for some epochs, from a state if there is one."""
    options = make_parser().parse_args()
    if options.warm or options.serve:
        (_warm if options.warm else _serve)(options)
        return
    dist.init_process_group("gloo")
    rank, out, state = dist.get_rank(), Path(options.out), Path(options.state)
    loader = make_loader(options)
    epochs: list[dict[str, Any]] = []
    with loader, (out / f"ids-{rank}.jsonl").open("a", buffering=1) as ids:
        if state.is_file():
            loader.load_state_dict(json.loads(state.read_text()))
        free = [_free(options)]
        while loader.epoch < options.epochs:
            before = loader.statistics()
            report = _epoch(loader, options, ids)
            after = loader.statistics()
            report["bytes_remote"] = after.bytes_remote - before.bytes_remote
            report["bytes_peers"] = after.bytes_peers - before.bytes_peers
            report["peer_failed"] = after.peer_failed - before.peer_failed
            epochs.append(report)
        free.append(_free(options))
        if rank == 0:
            _write(state, loader.state_dict())
        verdict = loader.statistics().verdict
        _write(
            out / f"rank-{rank}.json",
            {"rank": rank, "epochs": epochs, "free": free, "verdict": verdict},
        )
        dist.barrier()  # finished ranks serve the others until those finish
    dist.destroy_process_group()


def _source(options: argparse.Namespace) -> Any:
    """Return the dataset, or two concatenated ones: the second has another remote and the same
    cache."""
    return (
        concat([_dataset(options), _dataset(options, options.more)])
        if options.more
        else (_dataset(options))
    )


def _dataset(options: argparse.Namespace, url: str = "") -> Dataset:
    more: dict[str, Any] = {"nodes": options.nodes.split(",")} if options.nodes else {}
    if options.token_file:
        more["token_file"] = options.token_file
    peers = Peers(options.peers, tls=options.tls, **more) if options.peers else None
    cache = DiskCache(options.cache, max_bytes=options.max_bytes, peers=peers)
    return Dataset(url or options.url, cache=cache, fields=("array", "id"))


def make_loader(options: argparse.Namespace, world: World | None = None) -> DataLoader:
    """Return the loader of a trial."""
    return DataLoader(
        _source(options),
        global_batch_size=options.batch,
        shuffle=True,
        drop_last=True,
        seed=7,
        order=Order(reshuffle=options.reshuffle),
        world=world,
    )


def _epoch(loader: DataLoader, options: argparse.Namespace, ids: TextIO) -> dict[str, Any]:
    """Train to the end of the epoch."""
    steps, epoch = Steps(options.step_s, ids), loader.epoch
    for fed in steps.run(loader, epoch=epoch):
        every = options.state_every
        if every and fed % every == 0 and dist.get_rank() == 0:
            _write(Path(options.state), loader.state_dict())
    return {"epoch": epoch, **steps.report()}


def _free(options: argparse.Namespace) -> float:
    """Return the AU, in percent, of the same loop over batches that cost nothing: the difference to
    100 is the overhead of the harness and of other processes on these cores."""
    size = options.batch // dist.get_world_size()
    nothing = (torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.int64))
    with contextlib.ExitStack() as stack:
        null = stack.enter_context(Path("/dev/null").open("w"))
        steps = Steps(options.step_s, null)
        for _ in steps.run([nothing] * options.free_steps, epoch=-1):
            pass
    return float(steps.report()["au"])


def _serve(options: argparse.Namespace) -> None:
    """Fill the cache with the whole dataset, report that, and serve it until the
    process is ended."""
    with make_loader(options, World(0, 1)) as loader:
        for _ in loader:
            pass
        print("serves", flush=True)
        sys.stdin.readline()


def _warm(options: argparse.Namespace) -> None:
    """Fill the cache in two halves; print all bytes, the bytes of the second half, and its
    CPU-seconds, which exclude imports and starts."""
    size_bytes = 0
    with _dataset(options) as dataset:
        for half in range(2):
            began_s = _cpu_s()
            result = warm(
                dataset,
                global_batch_size=options.batch,
                shuffle=True,
                seed=7,
                world=World(0, 1),
                process=(half, 2),
            )
            size_bytes += result.bytes
        print(size_bytes, result.bytes, _cpu_s() - began_s, flush=True)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _write(path: Path, report: object) -> None:
    """Write a file atomically."""
    half = path.with_suffix(".half")
    half.write_text(json.dumps(report))
    half.replace(path)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of a process in a trial."""
    parser = argparse.ArgumentParser(description=sys.modules[__name__].__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--more", default="", help="a second dataset, appended to the first")
    parser.add_argument("--cache", required=True)
    parser.add_argument("--max-bytes", required=True)
    parser.add_argument("--out", default="")
    parser.add_argument("--state", default="")
    parser.add_argument("--peers", default="")
    parser.add_argument("--nodes", default="", help="comma-separated addresses")
    parser.add_argument("--token-file", default="")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--free-steps", type=int, default=2)
    parser.add_argument("--state-every", type=int, default=0)
    parser.add_argument("--reshuffle", type=float, default=0.0)
    parser.add_argument("--tls", action="store_true", help="encrypt with the job's certificates")
    parser.add_argument(
        "--warm", action="store_true", help="only fill the cache and print its CPU time"
    )
    parser.add_argument("--serve", action="store_true", help="only fill the cache and serve it")
    return parser


if __name__ == "__main__":
    main()
