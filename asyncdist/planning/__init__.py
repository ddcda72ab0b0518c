"""Estimates in closed form what a policy costs on given ranks and links, for ``asyncdist plan``."""
