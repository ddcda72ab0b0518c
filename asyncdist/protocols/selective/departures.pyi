from protocols.selective.departures import *
