"""`microturn plan`: how many sessions of a model a machine serves, by memory and by time. Open `plan` first.

`shape` and `machine` are the input, `step_times` the time of a step (roofline or measured), `beat` the simulation of
turns; `measuring` and `serving_cost` measure this machine.
"""
