"""Ends a rank that has failed, and says what went wrong."""
