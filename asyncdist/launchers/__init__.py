"""Facts about launchers and the ranks that they start: variables, signals, and the addresses at which ranks meet."""
