"""Awaitable functions for training code."""
