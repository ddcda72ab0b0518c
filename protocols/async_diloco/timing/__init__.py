"""Numbers of steps and grace periods that depend on the ranks' measured speeds."""
