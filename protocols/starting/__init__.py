"""Starts a policy's ranks together, without lost ranks and with errors that explain a failed start."""
