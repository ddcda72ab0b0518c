from protocols.evolution import *
