from protocols.ranking import *
