"""Detects launchers such as mpirun, torchrun and srun, and reads their variables, signals and rendezvous addresses."""
