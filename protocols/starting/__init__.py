"""How the members of a policy start together: without those that are lost, or with an error that explains why not."""
