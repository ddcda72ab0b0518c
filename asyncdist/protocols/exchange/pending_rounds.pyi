from protocols.exchange.pending_rounds import *
