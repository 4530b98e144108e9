"""Small datasets whose decoded images stay in memory."""
