"""Chooses what to deploy: the best model of a population or of saved checkpoints, or a mean of several models."""
