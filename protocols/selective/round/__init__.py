"""Keeps one round of selective averaging: what the coordinator knows of it, and its course from start to end."""
