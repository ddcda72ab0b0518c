from protocols.async_diloco.replicated import *
