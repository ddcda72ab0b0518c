"""Sends a fragment's newest state to a member that missed the means of earlier rounds."""
