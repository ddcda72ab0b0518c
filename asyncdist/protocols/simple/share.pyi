from protocols.simple.share import *
