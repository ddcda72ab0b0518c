from protocols.selective import *
