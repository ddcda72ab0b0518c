from protocols.async_diloco.offers import *
