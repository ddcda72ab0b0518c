"""Ranks that fail, for the benchmark ``goodput``."""
