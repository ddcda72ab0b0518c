from protocols.exchange.fragment import *
