from protocols.misuse import *
