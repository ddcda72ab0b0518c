from protocols.selective.board import *
