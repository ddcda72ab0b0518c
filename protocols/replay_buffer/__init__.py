"""Replay buffers served by ranks of the job."""
