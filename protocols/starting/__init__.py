"""Starts the members of a policy together, without lost ranks, or raises an error that explains the obstacle."""
