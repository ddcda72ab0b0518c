from protocols.simple.center import *
