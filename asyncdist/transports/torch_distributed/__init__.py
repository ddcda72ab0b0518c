"""Sends messages over torch.distributed with the gloo backend."""
