"""`microturn bench`: what the engine by itself can do on this machine, without Triton."""
