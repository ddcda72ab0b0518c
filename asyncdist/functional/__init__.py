"""Offers awaitable functions for training code."""
