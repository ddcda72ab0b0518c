from protocols.one_sided import *
