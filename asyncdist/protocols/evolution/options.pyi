from protocols.evolution.options import *
