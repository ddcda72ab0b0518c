"""One round of selective averaging on the coordinator: its state, its course from start to end, and its messages."""
