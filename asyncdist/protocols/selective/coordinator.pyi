from protocols.selective.coordinator import *
