"""A server without a model and without sockets, for tests of programs that use ``microturn_client``.

    server = FakeServer()
    with server.client() as client, client.session() as session:
        ...
        server.break_streams()      # and the program goes on

Its answers are a hash of all that a session knows, so a program that loses a turn gets other ones. It has the sessions
of the contract, and leaves out what needs a model: chat templates, windows, penalties, stop texts, and deadlines.
"""

from microturn_client.testing._fake_server import FakeServer

__all__ = ["FakeServer"]
