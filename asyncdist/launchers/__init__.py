"""Detects launchers (mpirun, torchrun, srun), and handles their variables, signals and rendezvous addresses."""
