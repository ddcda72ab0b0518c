"""Announces that ranks leave, end or fail, along a tree of the ranks, in large worlds."""
