"""The `penstock` command: a table of library calls."""

from pipeline.cli.main import main

__all__ = ["main"]
