"""Saves and loads population checkpoints."""
