"""Lets a restarted rank rejoin a running policy: admission requests, and the transfer of a member's state."""
