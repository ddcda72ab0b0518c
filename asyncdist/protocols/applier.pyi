from protocols.applier import *
