"""Models the processes of simulated ranks: their event loops, losses and restarts, and the clean-up of killed ones."""
