from protocols.one_sided.base import *
