"""Transport over torch.distributed with the gloo backend."""
