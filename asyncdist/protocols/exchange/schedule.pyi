from protocols.exchange.schedule import *
