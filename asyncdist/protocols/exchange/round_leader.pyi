from protocols.exchange.round_leader import *
