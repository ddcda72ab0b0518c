"""Replays a recorded run in the simulator."""
