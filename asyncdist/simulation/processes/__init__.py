"""Models the processes of simulated ranks: event loops, deaths and restarts, and the clean-up of killed processes."""
