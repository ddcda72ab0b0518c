"""Records the events of each rank: keeps the latest in memory, writes all to a file, and reads the file back."""

from asyncdist import compiled

__path__[:0] = compiled.search_path("recording")
