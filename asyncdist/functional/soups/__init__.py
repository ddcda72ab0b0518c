"""Chooses the weights to deploy: the best model of a population or of saved checkpoints, or a mean of models."""
