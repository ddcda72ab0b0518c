"""DiLoCo without rounds for the workers: the leader applies each contribution when it arrives."""
