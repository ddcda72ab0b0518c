"""Exchanges messages and tensors between ranks: polling engine, typed channels, and bulk streams."""

from asyncdist import compiled

__path__[:0] = compiled.search_path("messaging")
