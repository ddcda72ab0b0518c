from protocols.selective.round.lifecycle import *
