"""Regional servers of islands, which contribute to a global server."""
