from protocols.population_training import *
