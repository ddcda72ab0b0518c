"""The transport over torch.distributed, on gloo."""
