"""Notifies all ranks in a large world, along a tree of the ranks, when ranks leave, end or fail."""
