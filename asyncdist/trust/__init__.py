"""Decides what a process believes of others: folders of its user, and secrets of jobs.

Every folder may import these modules, and they import the ground alone.
"""
