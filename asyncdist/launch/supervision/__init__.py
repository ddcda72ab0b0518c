"""Supervises ranks for a launcher: restarts, the rank that has ended the job, and the signals of an mpirun."""
