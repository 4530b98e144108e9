"""Tests that run what the documents show."""
