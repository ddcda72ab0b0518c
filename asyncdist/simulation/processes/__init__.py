"""Stands for the processes of simulated ranks: the loop of each, which ones are alive, and what killed ones leave."""
