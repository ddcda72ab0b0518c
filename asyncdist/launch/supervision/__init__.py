"""Supervises an mpirun for its launcher: passes signals on, and finds the rank that has ended the job."""
