"""`python -m penstock.pipeline.cli`, where the `penstock` script isn't on the path."""

import sys

from penstock.pipeline.cli.main import main

if __name__ == "__main__":  # workers of MPI import it, too
    sys.exit(main())
