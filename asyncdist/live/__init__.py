"""Shows and exports the counters of ranks while they train."""
