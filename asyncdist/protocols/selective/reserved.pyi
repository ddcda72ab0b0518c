from protocols.selective.reserved import *
