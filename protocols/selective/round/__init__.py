"""Defines one round of selective averaging on the coordinator: its state, its transitions and its messages."""
