from protocols.exchange.ledger import *
