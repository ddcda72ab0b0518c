"""What ranks agree on before they start something together, and how they find out that they cannot."""
