from protocols.diloco.fragments import *
