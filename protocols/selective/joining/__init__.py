"""Lets a restarted rank rejoin selective averaging: its round for newcomers, and the state that it receives."""
