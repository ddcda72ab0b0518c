from protocols.async_diloco.policy import *
