from protocols.starting.differences import *
