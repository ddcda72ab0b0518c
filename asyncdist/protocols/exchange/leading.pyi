from protocols.exchange.leading import *
