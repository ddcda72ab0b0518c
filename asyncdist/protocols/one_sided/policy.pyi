from protocols.one_sided.policy import *
