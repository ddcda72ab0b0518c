from protocols.exchange.catching_up.catch_up import *
