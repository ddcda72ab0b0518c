from protocols.selective.round.course import *
