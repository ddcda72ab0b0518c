from protocols.selective.waiting import *
