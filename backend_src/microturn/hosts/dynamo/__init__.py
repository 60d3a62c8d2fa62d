"""Several workers with an engine each, behind edges without any state, on NVIDIA Dynamo's runtime. Open `edge` first.

    client ── gRPC ──▶ edge ── endpoint `turn`, to one worker ──▶ worker ──▶ engine
                        └───── endpoint `control`, to each ─────▶ how much is there, and whether it lives

Of Dynamo it is the discovery of workers and the requests to them; sessions, their owners and their hand-over are ours.
Only this room imports Dynamo's modules (the extra `microturn[dynamo]`).
"""
