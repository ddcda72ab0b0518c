from protocols.selective.islands import *
