"""Distributes the last messages of each rank in a large world: that it leaves, has ended, or has failed."""
