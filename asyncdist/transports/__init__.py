"""Transports, which carry messages between ranks: one contract (``base``), and a module or folder for each backend."""

from asyncdist import compiled

__path__[:0] = compiled.search_path("transports")
