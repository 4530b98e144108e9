"""The `penstock` command: a table of library calls."""

from penstock.pipeline.cli.main import main

__all__ = ["main"]
