"""Lets a restarted rank rejoin selective averaging, in a round for newcomers in which it receives a member's state."""
