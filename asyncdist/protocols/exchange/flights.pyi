from protocols.exchange.flights import *
