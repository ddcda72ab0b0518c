from protocols.selective_diloco.donors import *
