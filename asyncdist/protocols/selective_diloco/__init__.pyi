from protocols.selective_diloco import *
