"""Awaitable functions for training code: collectives, averaging, checkpoints, requests and roles of ranks."""
