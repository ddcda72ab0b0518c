from protocols.selective.roles.replacer import *
