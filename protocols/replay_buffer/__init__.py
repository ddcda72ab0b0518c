"""Replay buffers, each stored by one rank of the job and used by others."""
