"""The roles of a member in a round: reporting its metric, sending its weights, and applying an average."""
