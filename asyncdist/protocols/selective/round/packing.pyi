from protocols.selective.round.packing import *
