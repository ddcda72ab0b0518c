from protocols.async_diloco.progress import *
