from protocols.async_diloco.member import *
