from protocols.exchange.messages import *
