"""The programs of docs/client.md run, with the fake server in place of a real one; tests/e2e runs them as printed."""

import re
from pathlib import Path

import pytest

import microturn_client
from microturn_client.testing import FakeServer
from support.programs import printed_by, programs_of

# The last one speaks Triton's own client, and needs a real server.
*PROGRAMS, _ = programs_of(Path(__file__).parents[3] / "docs" / "client.md")
PRINTED = [
    r"[a-z ]{12}\n53 tokens of context\n",
    r"[a-z ]{30}\n[a-z ]{30}\n",
    r"[a-z ]{8}length 0\.0 ms\n",
    r"the branch has \d+ tokens more; 1 were heard at first\n",
    r"\{'plant': '(lily|rose|tulip)', 'count': \d+\}\n(yes|no)\n",
    r"get_weather \{'city': '(Bern|Chur)'\}\n[a-z ]{40}\n",
    r"(\[\d chunks, \d+ ms late\][a-z ])+\n?",
    r"[a-z ]{12}",
    r"it is ready to answer\n",
    r"ask for less: .*max_context=64\n",
    r"0 tokens came from drafts\n",
    r"35 tokens, the same: True\n",
]


@pytest.mark.parametrize(("program", "printed"), list(zip(PROGRAMS, PRINTED, strict=True)))
def test_a_program_runs(program, printed, monkeypatch, capsys):
    server = FakeServer(token_s=0.0005)
    monkeypatch.setattr(microturn_client, "Client", lambda _address, **options: server.client(**options))
    monkeypatch.setattr(microturn_client, "AsyncClient", lambda _address, **options: server.async_client(**options))
    assert "localhost:8001" in program or "FakeServer" in program
    exec(compile(program, "client.md", "exec"), {"__name__": "readme"})
    assert re.fullmatch(printed, capsys.readouterr().out)


def test_a_server_that_is_not_there_is_said_so():
    [program] = [program for program in PROGRAMS if "Unavailable" in program]
    assert printed_by(program.replace("localhost:8001", "127.0.0.1:1")) == "the server is not there\n"
