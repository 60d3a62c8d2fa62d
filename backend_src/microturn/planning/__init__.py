"""`microturn plan`: how many sessions of a model a machine serves, by memory and by time. Open `plan` first.

`microturn check`: how one model would be served here, found out by loading it. Open `check` first.

`shape` and `machine` are the input, `step_times` the time of a step (roofline or measured), `beat` the simulation of
turns; `measuring` and `serving_cost` measure this machine.
"""
