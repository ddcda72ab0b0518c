"""How collectives are carried out: by messages, in pieces, in rank order, through memory that ranks share."""
