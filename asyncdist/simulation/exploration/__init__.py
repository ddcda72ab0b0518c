"""Runs a scenario on many seeds, and finds a minimal fault plan that fails."""
