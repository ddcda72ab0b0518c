"""Lets a recorded run happen again in the simulator."""
