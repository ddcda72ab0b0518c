"""The progress engine, and point-to-point messages and streams on it."""

from asyncdist import compiled

__path__[:0] = compiled.search_path("messaging")
