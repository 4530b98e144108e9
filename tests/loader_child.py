"""Run one loader and print the contents of its batches; test_bench_loaders starts it by `python
-m`."""

from __future__ import annotations

import sys

from penstock.pipeline.bench import send_to_parent
from penstock.pipeline.bench.adapters import Work, find_adapter


def main(name: str, report: str, batches: int) -> None:
    work, adapter = Work.from_json(report), find_adapter(name)
    adapter.make_ready(work)
    loader = adapter.build(work)
    source = loader.batches()
    for _ in range(batches):
        images, labels = next(source)
        send_to_parent(
            {
                "shape": list(images.shape),
                "dtypes": [str(images.dtype), str(labels.dtype)],
                "labels": labels.tolist(),
                "planes": images.mean(dim=(2, 3)).tolist(),
            }
        )
    source.close()  # type: ignore[attr-defined]
    loader.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
