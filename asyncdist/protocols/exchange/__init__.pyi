from protocols.exchange import *
