"""Resets or updates the state of optimizers when the model's weights are replaced by an average."""
