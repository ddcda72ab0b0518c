"""Notifies all ranks of a large world, along a tree of the ranks, of ranks that leave, end or fail."""
