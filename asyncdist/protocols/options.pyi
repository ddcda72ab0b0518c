from protocols.options import *
