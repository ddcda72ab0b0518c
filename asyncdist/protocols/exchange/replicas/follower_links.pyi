from protocols.exchange.replicas.follower_links import *
