from protocols.population_training.bayesian import *
