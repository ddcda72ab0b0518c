"""Decides what a process believes of others: folders of the own user, secrets of jobs, strings that are shown.

Every folder may import these modules, and they import the ground alone.
"""
