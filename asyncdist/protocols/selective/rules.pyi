from protocols.selective.rules import *
