from protocols.exchange.options import *
