from protocols.exchange.counts import *
