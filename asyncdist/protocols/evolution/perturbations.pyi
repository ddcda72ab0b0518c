from protocols.evolution.perturbations import *
