from protocols.average_all import *
