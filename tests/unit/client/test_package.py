"""What a user sees of the package from outside: its import, its names, its exit."""

import importlib
import importlib.metadata
import importlib.resources
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import microturn_client
import microturn_gateway


def run(program: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_import_takes_no_torch_no_server_no_numpy_and_no_client_of_tritons():
    done = run("import sys, microturn_client; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    modules = set(done.stdout.split())
    assert "microturn_client" in modules
    assert modules.isdisjoint({"torch", "transformers", "microturn", "tritonclient", "numpy", "importlib.metadata"})


def test_a_talk_in_text_and_ids_takes_no_numpy():
    program = """
import sys
from microturn_client.testing import FakeServer
with FakeServer().client() as client, client.session() as session:
    session.append("a text")
    session.append([1, 2])
    session.turn(max_tokens=2, stop_token_ids=[3]).wait()
    session.rewind(to=1)
print("numpy" in sys.modules)
"""
    assert run(program).stdout == "False\n"


def test_a_tensor_of_another_library_takes_no_torch():
    program = """
import sys
import numpy as np
from microturn_client import SupportsDLPack
from microturn_client._inputs import encode_input
class Tensor:
    def __dlpack__(self, *, stream=None): return np.ones((2, 3)).__dlpack__()
    def __dlpack_device__(self): return (1, 0)
tensor: SupportsDLPack = Tensor()
print(encode_input(tensor).shape, "torch" in sys.modules)
"""
    assert run(program).stdout == "(1, 2, 3) False\n"


def test_the_import_takes_few_modules():
    """It takes 150 ms on a quiet machine, nearly all of them for modules, so these are what is counted."""
    done = run("import asyncio, sys; a = set(sys.modules); import microturn_client; print(*(set(sys.modules) - a))")
    modules = done.stdout.split()
    assert len(modules) <= 130
    others = {module.split(".")[0] for module in modules} - sys.stdlib_module_names
    assert others == {"google", "microturn_client"}


def test_the_version_is_that_of_the_distribution():
    assert microturn_client.__version__ == importlib.metadata.version("microturn-client")


def test_the_package_says_that_it_is_typed():
    assert (importlib.resources.files(microturn_client) / "py.typed").is_file()


def test_every_public_name_is_documented():
    for name in microturn_client.__all__:
        thing = getattr(microturn_client, name)
        if typing.get_origin(thing) is not None or not inspect.isclass(thing):
            continue  # a type alias
        assert inspect.getdoc(thing), name
        ours = [base for base in thing.__mro__ if base.__module__.startswith("microturn_client")]
        for member, value in (pair for base in ours for pair in vars(base).items()):
            if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                assert inspect.getdoc(getattr(thing, member)), f"{name}.{member}"


def test_what_the_gateway_shows_is_documented():
    """Its modules are used by its own programs alone, and yet read by who wants to change it."""
    for file in sorted(Path(microturn_gateway.__file__).parent.glob("*.py")):
        module = importlib.import_module(f"microturn_gateway.{file.stem}")
        assert inspect.getdoc(module) or file.stem.startswith("__"), file.name
        for name, thing in vars(module).items():
            is_ours = getattr(thing, "__module__", "") == module.__name__
            if name.startswith("_") or not is_ours or not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            assert inspect.getdoc(thing), f"{file.stem}.{name}"
            members = vars(thing).items() if inspect.isclass(thing) else ()
            for member, value in members:
                if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                    assert inspect.getdoc(value), f"{file.stem}.{name}.{member}"


def test_all_names_what_the_package_has():
    public = {name for name, value in vars(microturn_client).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert public == set(microturn_client.__all__)


FORGETFUL = {
    "nothing is closed": """
client = Client(sys.argv[1])
session = client.session()
session.append([1])
""",
    "a turn is in the middle": """
session = Client(sys.argv[1]).session()
turn = session.turn([1], max_tokens=100)
next(turn)
""",
    "the session is dropped": """
client = Client(sys.argv[1])
client.session().append([1])
""",
    "all is closed": """
with Client(sys.argv[1]) as client, client.session() as session:
    session.append([1])
""",
    "an idle session is kept alive": """
session = Client(sys.argv[1]).session()
session.append([1])
import time; time.sleep(0.1)
""",
    "asyncio, nothing is closed": """
async def main():
    session = AsyncClient(sys.argv[1]).session()
    await session.append([1])
asyncio.run(main())
""",
    "asyncio, a turn is in the middle": """
async def main():
    session = AsyncClient(sys.argv[1]).session()
    async for event in session.turn([1], max_tokens=100):
        break
asyncio.run(main())
""",
    "asyncio, the client outlives its loop": """
client = AsyncClient(sys.argv[1])
session = client.session()
async def main():
    await session.append([1])
asyncio.run(main())
""",
    "asyncio, all is closed": """
async def main():
    async with AsyncClient(sys.argv[1]) as client, client.session() as session:
        await session.append([1])
asyncio.run(main())
""",
}


@pytest.mark.parametrize("program", FORGETFUL.values(), ids=FORGETFUL.keys())
def test_the_interpreter_exits_in_silence(server, program):
    server.expires_in_s = 0.06
    # gRPC takes a while to import, and asyncio's debug mode would print that a step of its loop took so long.
    imports = "import asyncio, grpc, sys\nfrom microturn_client import AsyncClient, Client"
    done = run(f"{imports}\n{program}", server.address)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_exception_in_the_program_is_all_that_is_printed(server):
    program = """
import sys
from microturn_client import Client
with Client(sys.argv[1]) as client, client.session() as session:
    session.append([1])
    sys.exit("the end")
"""
    done = run(program, server.address)
    assert (done.returncode, done.stderr) == (1, "the end\n")
