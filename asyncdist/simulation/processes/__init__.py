"""Models the processes of simulated ranks: event loops, deaths, restarts, memory, and the clean-up after a death."""

from asyncdist import compiled

__path__[:0] = compiled.search_path("simulation/processes")
