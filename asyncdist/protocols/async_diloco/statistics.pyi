from protocols.async_diloco.statistics import *
