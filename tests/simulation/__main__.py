"""Runs seeds: `python -m simulation 0:10000`, or one of them again: `python -m simulation 17 --without fault:1`."""

from simulation.command import main

main()
