"""Receives the newest state of a fragment on a member that is behind."""
