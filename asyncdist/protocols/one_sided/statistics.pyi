from protocols.one_sided.statistics import *
