from protocols.selective.sub_populations import *
