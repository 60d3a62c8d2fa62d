"""The wire contract as gRPC, where there is no Triton: the worker's and the edge's front. Open `service` first.

gRPC ──▶ service ──▶ a `Front`: `engine_front` hands turns to an engine, an edge to a worker
         envelope: whose a request is; messages: requests to turns, answers to responses
"""
