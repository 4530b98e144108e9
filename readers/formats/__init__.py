"""The containers that samples lie in, one module or folder a format."""
