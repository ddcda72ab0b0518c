from protocols.one_sided.reader import *
