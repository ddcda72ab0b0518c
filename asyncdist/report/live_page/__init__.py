"""Serves the report of a running job as a page that refreshes: ``asyncdist top --web``."""
