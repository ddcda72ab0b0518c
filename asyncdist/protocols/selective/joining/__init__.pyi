from protocols.selective.joining import *
