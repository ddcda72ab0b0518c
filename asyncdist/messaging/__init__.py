"""Progress engine, point-to-point channels, and bulk streams of tensors."""

from asyncdist import compiled

__path__[:0] = compiled.search_path("messaging")
