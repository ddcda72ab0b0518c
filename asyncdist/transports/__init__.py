"""Carries messages between ranks. ``base`` defines the contract of all transports; each has a module or folder."""

from asyncdist import compiled

__path__[:0] = compiled.search_path("transports")
