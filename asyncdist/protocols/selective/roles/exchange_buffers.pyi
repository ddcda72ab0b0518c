from protocols.selective.roles.exchange_buffers import *
