"""`python -m pipeline.cli`, where the `penstock` script isn't on the path."""

import sys

from pipeline.cli.main import main

sys.exit(main())
