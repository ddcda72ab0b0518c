from protocols.one_sided.following import *
