from protocols.one_sided.population_averaging import *
