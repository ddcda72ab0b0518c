from protocols.metrics import *
