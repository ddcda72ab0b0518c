from protocols.exchange.fetch import *
