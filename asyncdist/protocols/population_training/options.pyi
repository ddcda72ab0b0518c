from protocols.population_training.options import *
