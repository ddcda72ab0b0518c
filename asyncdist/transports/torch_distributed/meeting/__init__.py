"""Lets the processes of a torch.distributed job find each other and make their gloo groups."""
