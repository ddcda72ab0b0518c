from protocols.async_diloco.server import *
