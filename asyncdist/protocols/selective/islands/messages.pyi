from protocols.selective.islands.messages import *
