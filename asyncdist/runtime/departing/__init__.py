"""Announces in large worlds that ranks leave, end or fail, along a tree of the ranks."""
