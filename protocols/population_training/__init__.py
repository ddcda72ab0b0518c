"""Implements population based training: the worst ranks copy the weights and hyperparameters of the best ranks."""
