from protocols.exchange.catching_up.offers import *
