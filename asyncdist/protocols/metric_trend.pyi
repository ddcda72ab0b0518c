from protocols.metric_trend import *
