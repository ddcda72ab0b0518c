from protocols.selective.roles.coordination import *
