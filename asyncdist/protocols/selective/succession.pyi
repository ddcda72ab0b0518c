from protocols.selective.succession import *
