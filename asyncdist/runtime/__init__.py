"""Starts, hosts and ends one rank: ``run``, the world, failures, signals, recordings and wait reports."""

import asyncdist.tensors  # noqa: F401 raises an error if torch is too old
