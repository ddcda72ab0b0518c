from protocols.selective.scopes import *
