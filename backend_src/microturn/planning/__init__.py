"""`microturn plan`: how many sessions of a model a machine serves, by memory and by time, before there is a machine."""
