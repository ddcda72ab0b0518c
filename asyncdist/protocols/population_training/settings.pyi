from protocols.population_training.settings import *
