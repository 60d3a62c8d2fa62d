"""``microturn serve``: the supervisor that owns SIGTERM, health and the process tree of one Triton server.

    microturn serve (supervisor)     signals, gRPC health, health turns, restarts
    └── warden                       kills what is below it when the supervisor is gone, however it went
        └── tritonserver
            └── model process        one per model instance; Triton never restarts it

It knows nothing about sessions or tensors: to it the model is whatever answers an empty turn.
"""
