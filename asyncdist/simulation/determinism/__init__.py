"""Makes simulated programs deterministic: clocks, random numbers, set order, generators, system calls."""
