from protocols.simple.rule import *
