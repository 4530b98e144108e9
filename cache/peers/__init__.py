"""How the caches of a job's nodes serve one another: protocol, tokens, server, and who asks."""
