from protocols.journal import *
