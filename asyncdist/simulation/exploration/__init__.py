"""Runs a scenario with many seeds, and finds a minimal fault plan for a failure."""
