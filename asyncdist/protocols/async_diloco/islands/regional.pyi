from protocols.async_diloco.islands.regional import *
