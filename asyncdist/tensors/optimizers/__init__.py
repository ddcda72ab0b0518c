"""Resets or updates the state of optimizers when an average replaces the model's weights."""
