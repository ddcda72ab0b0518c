from protocols.starting.without_lost import *
