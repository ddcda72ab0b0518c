"""Transports: one contract (:mod:`asyncdist.transports.base`) and one module or folder for each backend."""

from asyncdist import compiled

__path__[:0] = compiled.search_path("transports")
