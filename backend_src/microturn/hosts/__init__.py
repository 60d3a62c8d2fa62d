"""What stands between the network and an engine: requests to turns, answers to responses. Two hosts serve one engine.

    triton/   Triton's Python backend loads the engine; the default
    dynamo/   a worker has the engine, and edges in front of several workers find them by NVIDIA Dynamo's runtime
    kserve/   the wire contract as gRPC, for the worker and the edge: Triton has its own

`hosted_engine` is what they share: an engine with its metrics, its admin socket and the other servers of its fleet.
Only `triton.adapter` imports Triton's module, and only `dynamo` imports Dynamo's.
"""
