"""`python -m benchmarks.cluster_manager HOST PORT`: the store of a trial's members, on a host.

Each line on its standard input is a JSON list, a method of the store and its arguments; it prints
what that gave, as JSON. Ends when standard input does.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def main() -> None:
    """Serve until standard input ends."""
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
