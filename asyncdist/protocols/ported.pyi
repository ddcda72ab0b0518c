from protocols.ported import *
