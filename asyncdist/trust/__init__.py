"""Decides which other processes to trust, by means of the user's private folders and job secrets."""
