"""Ends a rank after a failure, and reports the failure."""
