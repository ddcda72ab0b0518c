"""Runs many seeds, and finds the least fault plan that fails."""
