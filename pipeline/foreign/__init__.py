"""The engine for torch datasets: torch's loader and workers inside, state around them."""
