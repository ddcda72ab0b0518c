from protocols.selective.round.state import *
