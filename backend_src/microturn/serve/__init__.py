"""``microturn serve``: starts one Triton server, watches its health, restarts it after a failure, and stops it.

    microturn serve (supervisor)     signals, gRPC health, health turns, restarts, the log
    └── warden                       kills the processes below it when the supervisor dies
        └── tritonserver
            └── model process        one per model instance; Triton never restarts it

The room deals with the command line, processes, ports and files; a model is healthy when it answers an empty turn.
Open `supervisor.py` first, then `command.py`, which builds its parts.

``microturn worker`` and ``microturn edge`` need no supervisor: `worker_command.py`, `edge_command.py`.
"""
