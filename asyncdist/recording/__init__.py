"""Events of each rank: kept in memory for reports, written to files, and read back."""

from asyncdist import compiled

__path__[:0] = compiled.search_path("recording")
