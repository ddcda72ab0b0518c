"""Decides which other processes a process trusts: private folders of its user, and secrets of jobs."""
