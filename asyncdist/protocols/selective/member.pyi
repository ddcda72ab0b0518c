from protocols.selective.member import *
