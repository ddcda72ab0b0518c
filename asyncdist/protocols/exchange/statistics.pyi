from protocols.exchange.statistics import *
