"""`python -m benchmarks.cluster_manager HOST PORT`: serve the store of a trial's members on a host.

Each line of the standard input is a JSON list of a method of the store and its arguments. The
result is printed as JSON. The process ends with its standard input.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def main() -> None:
    """Serve until the standard input ends."""
    limit = timedelta(seconds=240)
    store = TCPStore(
        sys.argv[1], int(sys.argv[2]), None, True, timeout=limit, wait_for_workers=False
    )
    print("serves", flush=True)
    for line in sys.stdin:
        name, *words = json.loads(line)
        found: Any = getattr(store, name)(*words)
        print(json.dumps(found.decode() if isinstance(found, bytes) else found), flush=True)


if __name__ == "__main__":
    main()
