from protocols.selective.statistics import *
