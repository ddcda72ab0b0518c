from protocols.diloco.outer_optimizers import *
