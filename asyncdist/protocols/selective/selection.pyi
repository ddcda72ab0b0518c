from protocols.selective.selection import *
