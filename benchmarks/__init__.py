"""Measurements and the demo. They use only Penstock's public interface, and may print."""
