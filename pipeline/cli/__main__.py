"""`python -m penstock.pipeline.cli`, where the `penstock` script isn't on the path."""

import sys

from penstock.pipeline.cli.main import main

sys.exit(main())
