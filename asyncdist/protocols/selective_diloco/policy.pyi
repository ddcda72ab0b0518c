from protocols.selective_diloco.policy import *
