from protocols.selective.rounds import *
