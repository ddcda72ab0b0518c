"""Makes a simulated program deterministic: its clocks, random numbers, sets, generators and access to the system."""
