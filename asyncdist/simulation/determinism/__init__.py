"""Makes simulated programs deterministic: controls clocks, random numbers, set order, generators, system calls."""
