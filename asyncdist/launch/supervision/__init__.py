"""How the launcher of an mpirun passes signals on, and finds out which rank has ended the job."""
