from protocols.selective.islands.visit import *
