"""Makes a simulated program deterministic: controls its clocks, random numbers, sets, generators and system calls."""
