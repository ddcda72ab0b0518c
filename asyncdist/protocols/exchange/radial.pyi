from protocols.exchange.radial import *
