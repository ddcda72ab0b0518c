from protocols.selective.leadership import *
