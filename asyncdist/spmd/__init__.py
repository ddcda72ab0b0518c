"""Defines meshes of ranks with named axes, and collectives on trees of tensors along these axes."""
