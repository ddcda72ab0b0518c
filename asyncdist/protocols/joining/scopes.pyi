from protocols.joining.scopes import *
