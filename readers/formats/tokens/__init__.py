"""Streams of token ids: flat files of numbers, and Megatron's .bin with an .idx beside it."""
