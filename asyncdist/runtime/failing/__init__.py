"""Ends a rank that has failed, and reports the failure."""
