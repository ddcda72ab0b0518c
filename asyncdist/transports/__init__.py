"""Carries messages between ranks. ``base`` defines the contract, and each backend has a module or folder."""

from asyncdist import compiled

__path__[:0] = compiled.search_path("transports")
