from protocols.async_diloco.timing.grace import *
