from protocols.simple import *
