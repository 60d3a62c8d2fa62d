"""The whole of Microturn in one process under a virtual clock: engine, adapter, wire and client cores, with faults.

A run is a pure function of its seed and of what is taken away from what the seed draws. `world` has time and chance,
`plan` what is drawn, `network`, `triton`, `backend` and `server` what stands between a client and the engine,
`raw_person` and `library_person` who talks, `faults` what goes wrong, `oracle` and `invariants` what must hold all the
same, `shrink` what is told of a finding. `python -m simulation 0:10000` runs it.
"""

from simulation import pb_utils

pb_utils.install()
