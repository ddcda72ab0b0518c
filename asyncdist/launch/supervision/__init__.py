"""Supervises ranks for a launcher: restarts them, passes on signals, and finds the rank that has ended the job."""
