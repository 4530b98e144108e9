"""Parquet files: row groups are decoded as a whole, column by column."""
