from protocols.population_training.hyperparameters import *
