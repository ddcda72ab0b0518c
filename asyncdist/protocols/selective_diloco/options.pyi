from protocols.selective_diloco.options import *
