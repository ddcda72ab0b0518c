from protocols.selective.roster import *
