from protocols.selective.round.plan import *
