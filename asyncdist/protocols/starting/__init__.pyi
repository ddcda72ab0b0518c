from protocols.starting import *
