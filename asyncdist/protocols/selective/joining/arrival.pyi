from protocols.selective.joining.arrival import *
