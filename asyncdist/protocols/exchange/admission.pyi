from protocols.exchange.admission import *
