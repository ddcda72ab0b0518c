from protocols.declared import *
