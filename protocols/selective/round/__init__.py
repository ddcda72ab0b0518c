"""Keeps one round of selective averaging: the coordinator's knowledge of it, and its course from start to end."""
