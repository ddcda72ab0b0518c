"""Averages contributions of members in numbered rounds, in the background, for policies without metrics."""
