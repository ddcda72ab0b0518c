from protocols.selective.islands.migrants import *
