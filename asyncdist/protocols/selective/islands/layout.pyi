from protocols.selective.islands.layout import *
