"""`microturn bench`: measures the steps of the engine on this machine, without Triton. Open `engine` first."""
