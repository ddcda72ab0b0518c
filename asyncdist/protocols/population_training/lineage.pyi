from protocols.population_training.lineage import *
