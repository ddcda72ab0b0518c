from protocols.exchange.exchange import *
