"""Shows and exports the counters of ranks (steps, metrics, messages) while they train."""
