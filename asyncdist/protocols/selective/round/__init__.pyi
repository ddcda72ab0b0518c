from protocols.selective.round import *
