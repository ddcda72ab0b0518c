"""Awaitable functions for training code: collectives, averaging, checkpoints, requests and rank roles."""
