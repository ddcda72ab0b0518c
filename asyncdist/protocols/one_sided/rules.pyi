from protocols.one_sided.rules import *
