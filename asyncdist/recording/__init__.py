"""Records each rank's events: keeps the latest events in memory, writes all events to a file, and reads such files."""

from asyncdist import compiled

__path__[:0] = compiled.search_path("recording")
