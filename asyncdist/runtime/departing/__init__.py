"""Announces leaving, ended and failed ranks along a tree of the ranks, in large worlds."""
