"""The admin socket: who looks after a server lists, exports and imports its sessions, and drains it.

A Unix socket that only the server's user may open. A request is one line of JSON, so is its reply:

    {"op": "list"}                                           {"result": [{"id": 4711, "context_len": 96, …}]}
    {"op": "export", "id": "4711", "path": "/tmp/4711"}      {"error": {"code": "NOT_FOUND", "message": "…"}}

Errors are those of the wire contract. Paths are absolute, and those of the server's machine.
"""
