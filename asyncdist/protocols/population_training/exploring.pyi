from protocols.population_training.exploring import *
