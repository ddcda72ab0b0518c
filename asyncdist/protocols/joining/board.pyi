from protocols.joining.board import *
