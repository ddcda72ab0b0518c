"""Decides which other processes a process trusts, by means of the user's private folders and job secrets."""
