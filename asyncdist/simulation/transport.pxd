from asyncdist.simulation.fabric cimport Fabric, Receive
