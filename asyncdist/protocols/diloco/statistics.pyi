from protocols.diloco.statistics import *
