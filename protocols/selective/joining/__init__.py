"""Lets a restarted rank rejoin selective averaging after it has received a member's state."""
