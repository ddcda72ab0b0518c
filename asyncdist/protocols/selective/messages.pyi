from protocols.selective.messages import *
