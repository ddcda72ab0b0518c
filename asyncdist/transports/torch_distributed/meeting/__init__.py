"""How the processes of a torch.distributed job find each other, and make the groups on which they talk."""
