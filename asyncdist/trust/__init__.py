"""Decides which other processes a process trusts: private folders of its user, and secrets of jobs.

Every package may import these modules. They import only the base modules.
"""
