"""One rank of a trial job of `benchmarks.cluster`: reads, sleeps for a step, waits for the others.

Started by torchrun on a host of its own. Writes the ids of every step, and last what it measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from penstock import DataLoader, Dataset, DiskCache, Peers


def main() -> None:
    """Train for some epochs, from a state if there is one."""
    options = _options()
    dist.init_process_group("gloo")
    rank, out, state = dist.get_rank(), Path(options.out), Path(options.state)
    loader = _loader(options)
    epochs: list[dict[str, float]] = []
    with loader, (out / f"ids-{rank}.jsonl").open("a", buffering=1) as ids:
        if state.is_file():
            loader.load_state_dict(json.loads(state.read_text()))
        while loader.epoch < options.epochs and not _is_done(epochs, options.steps):
            before = loader.statistics()
            told = _epoch(loader, options, ids, done=int(sum(e["steps"] for e in epochs)))
            after = loader.statistics()
            told["bytes_remote"] = after.bytes_remote - before.bytes_remote
            told["bytes_peers"] = _from_peers(after) - _from_peers(before)
            epochs.append(told)
        if rank == 0:
            _write(state, loader.state_dict())
        measured = {"rank": rank, "epochs": epochs, "verdict": loader.statistics().verdict}
        _write(out / f"rank-{rank}.json", measured)
    dist.barrier()
    dist.destroy_process_group()


def _is_done(epochs: list[dict[str, float]], steps: int) -> bool:
    """Whether as many steps were made as were asked for; never for 0."""
    return steps > 0 and sum(epoch["steps"] for epoch in epochs) >= steps


def _loader(options: argparse.Namespace) -> DataLoader:
    peers = Peers(options.peers, tls=False) if options.peers else None
    cache = DiskCache(options.cache, max_bytes=options.max_bytes, peers=peers)
    return DataLoader(
        Dataset(options.url, cache=cache, fields=("array", "id")),
        global_batch_size=options.batch,
        shuffle=True,
        drop_last=True,
        seed=options.seed,
        reshuffle=options.reshuffle,
        **({"slots": options.slots} if options.slots != "data" else {}),
    )


def _epoch(
    loader: DataLoader, options: argparse.Namespace, ids: TextIO, *, done: int
) -> dict[str, float]:
    """Train to the end of the epoch, or of the steps. done: steps before."""
    epoch, began, compute_s, fed = loader.epoch, time.perf_counter(), 0.0, 0
    for data, id in loader:
        if fed == 0:
            began = time.perf_counter()  # the first step is left out, as DLIO does
        else:
            compute_s += options.step_s
        assert len(data) == len(id)
        time.sleep(options.step_s)
        ids.write(json.dumps({"epoch": epoch, "ids": id.tolist()}) + "\n")
        dist.all_reduce(torch.zeros(1))
        fed += 1
        every = options.state_every
        if every and (done + fed) % every == 0 and dist.get_rank() == 0:
            _write(Path(options.state), loader.state_dict())
        if done + fed == options.steps:
            break
    elapsed_s = max(1e-9, time.perf_counter() - began - options.step_s)
    au = 100 * compute_s / elapsed_s
    return {"epoch": epoch, "steps": fed, "elapsed_s": elapsed_s, "au": au}


def _from_peers(statistics: object) -> int:
    return int(getattr(statistics, "bytes_peers", 0))


def _write(path: Path, told: object) -> None:
    """Write a file that is whole or not there."""
    half = path.with_suffix(".half")
    half.write_text(json.dumps(told))
    half.replace(path)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=sys.modules[__name__].__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--max-bytes", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--state", required=True)
    parser.add_argument("--peers", default="")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="stop after so many; 0: never")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--state-every", type=int, default=0)
    parser.add_argument("--reshuffle", type=float, default=0.0)
    parser.add_argument("--slots", default="data")
    return parser.parse_args()


if __name__ == "__main__":
    main()
