from protocols.exchange.results import *
