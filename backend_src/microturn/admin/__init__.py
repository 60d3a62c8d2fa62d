"""The admin socket: lists, exports and imports the sessions of a running server, and drains it.

A Unix socket that only the server's user can open. A request is one line of JSON, and so is its reply:

    {"op": "list"}                                           {"result": [{"id": 4711, "context_len": 96, …}]}
    {"op": "export", "id": "4711", "path": "/tmp/4711"}      {"error": {"code": "NOT_FOUND", "message": "…"}}

Errors have the codes of the wire protocol. Paths are absolute, on the server's machine. Open `operations` first.
"""
