"""Run `penstock` as `python -m penstock.pipeline.cli`, where the script isn't on the path."""

from __future__ import annotations

import sys

from penstock.pipeline.cli.main import main

if __name__ == "__main__":  # workers of MPI import it, too
    sys.exit(main())
