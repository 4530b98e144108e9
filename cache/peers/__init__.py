"""The nodes of a job serve one another what their caches hold."""
