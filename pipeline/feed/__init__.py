"""The native engine: from a plan's positions to batches of tensors."""
