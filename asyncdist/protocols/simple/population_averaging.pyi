from protocols.simple.population_averaging import *
