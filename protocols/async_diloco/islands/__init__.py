"""Implements the regional servers of islands (groups of ranks), which contribute to a global server."""
