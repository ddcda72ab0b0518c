from protocols.exchange.policy import *
