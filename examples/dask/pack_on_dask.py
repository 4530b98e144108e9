"""Pack a dataset on a Dask cluster: each worker writes shards, killed at any moment it goes on.

    python examples/dask/pack_on_dask.py photos /shared/packed --scheduler tcp://scheduler:8786
    python examples/dask/pack_on_dask.py photos packed                  # on this machine's cores

The workers need penstock, and the folders at the same paths (the source may be a URL).
The bytes are those of `penstock pack` on one machine.
"""

from __future__ import annotations

import argparse

from distributed import Client

from penstock import pack


def main() -> None:
    parser = argparse.ArgumentParser(description="Pack a dataset on a Dask cluster.")
    parser.add_argument("source")
    parser.add_argument("destination")
    parser.add_argument("--scheduler", help="tcp://host:port; without it workers are started here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-bytes", default="64MiB")
    options = parser.parse_args()
    with Client(
        options.scheduler, **({} if options.scheduler else {"dashboard_address": None})
    ) as client:
        summary = pack(
            options.source,
            options.destination,
            seed=options.seed,
            shard_bytes=options.shard_bytes,
            executor=client.get_executor(),
        )
    print(summary)


if __name__ == "__main__":
    main()
