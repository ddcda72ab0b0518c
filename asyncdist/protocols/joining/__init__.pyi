from protocols.joining import *
