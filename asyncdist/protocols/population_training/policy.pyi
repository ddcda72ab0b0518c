from protocols.population_training.policy import *
