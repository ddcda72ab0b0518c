from protocols.exchange.catching_up import *
