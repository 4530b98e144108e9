"""Fetching ranges of a store's objects: in parallel, retried, hedged, limited and counted."""
