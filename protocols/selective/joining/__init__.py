"""Lets a restarted rank rejoin selective averaging: admission, and the transfer of a member's state."""
