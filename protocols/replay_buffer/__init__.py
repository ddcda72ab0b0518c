"""Replay buffers, each served by a rank of the job."""
