from protocols.one_sided.selection import *
