from protocols.diloco.outer_step import *
