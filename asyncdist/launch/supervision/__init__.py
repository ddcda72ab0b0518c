"""Supervises ranks for a launcher: restarts them, passes on signals, and finds out which rank has ended the job."""
