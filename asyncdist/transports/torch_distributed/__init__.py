"""The transport over torch.distributed: gloo, and backends whose work can be polled."""
