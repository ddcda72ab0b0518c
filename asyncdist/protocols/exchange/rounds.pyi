from protocols.exchange.rounds import *
