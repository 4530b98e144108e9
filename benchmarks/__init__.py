"""Measurements and the demo. They use Penstock's public surface only, and may print."""
