"""The life of ``microturn serve``: ready, restarts, stop, and what is left when it is killed."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack

import pytest

from microturn.serve.process_tree import is_alive
from support.processes import alive_after
from support.raw import RawStream, ids


@pytest.fixture
def held_stream():
    """Opens streams that a client keeps open, which is what Triton waits for when it stops."""
    with ExitStack() as streams:

        def hold(served) -> None:
            stream = streams.enter_context(RawStream(served.address))
            assert stream.ask("held", start=True, end=True, input_ids=ids()).error is None  # by now it is open

        yield hold


def test_a_served_model_answers_turns_and_stops_clean(serve):
    served = serve("--set", "page_size=32")
    served.wait_until_ready()
    assert served.turn(1) == ["output_ids", "status"]
    assert served.health() == "SERVING"
    assert served.health("streaming_llm") == "SERVING"
    assert 'settings: {"fault": "none", "page_size": "32"}' in served.said
    assert len(served.traces()) >= 3  # the run directory, the lock, shared memory
    tree = served.tree()
    served.process.send_signal(signal.SIGTERM)
    assert served.wait_for_exit() == 0
    assert served.traces() == []
    assert alive_after(tree, 0.1) == []
    assert "microturn: starting Triton" in served.said
    assert served.said[-1] == "microturn: stopped"


def test_sessions_go_on_until_proxies_have_noticed(serve):
    """Who was told to move before its proxy knew came back to the server that it was to leave."""
    served = serve("--drain-notice-s", "60", "--grace-s", "120")
    served.wait_until_ready()
    served.process.send_signal(signal.SIGTERM)
    served.wait_for_health("NOT_SERVING")
    assert served.turn(1) == ["output_ids", "status"]
    served.process.send_signal(signal.SIGTERM)  # that is enough
    assert served.wait_for_exit() == 0


def test_a_stop_says_unhealthy_at_once_and_does_not_wait_for_open_streams(serve, held_stream):
    """Triton hangs past its own timeout, without an end, as long as a client keeps a stream open."""
    served = serve("--grace-s", "8")
    served.wait_until_ready()
    held_stream(served)
    assert served.health() == "SERVING"
    tree = served.tree()
    served.process.send_signal(signal.SIGTERM)
    served.wait_for_health("NOT_SERVING")
    assert served.process.poll() is None
    assert served.wait_for_exit() == 0
    assert "microturn: the grace time is over, and streams may still be open: ending them" in served.said
    assert served.traces() == []
    assert alive_after(tree, 0.1) == []


def test_a_second_signal_ends_the_grace(serve, held_stream):
    served = serve("--grace-s", "300")
    served.wait_until_ready()
    held_stream(served)
    served.process.send_signal(signal.SIGINT)
    served.wait_for_line("microturn: stopping")
    served.process.send_signal(signal.SIGINT)
    assert served.wait_for_exit() == 0
    assert served.traces() == []


def test_a_stop_while_starting_needs_no_patience(serve):
    served = serve("--grace-s", "300")
    served.wait_for_line("microturn: starting")
    served.process.send_signal(signal.SIGTERM)
    assert served.wait_for_exit() == 0


def test_a_killed_model_process_is_replaced(serve):
    """Triton stays ready, answers 'not healthy' and never restarts it."""
    served = serve()
    served.wait_until_ready()
    dead = served.model_process()
    dead.kill()
    served.wait_for_line(f"microturn: the model process {dead.pid} died; restarting")
    served.wait_for_line("ready in ")
    assert served.health() == "SERVING"
    assert served.turn(2) == ["output_ids", "status"]
    assert len([file for file in served.traces() if not file.is_dir()]) == 2  # the dead one's memory is gone


def test_a_killed_server_is_replaced(serve):
    served = serve()
    served.wait_until_ready()
    (triton,) = [process for process in served.tree() if process.name() == "tritonserver"]
    triton.kill()
    served.wait_for_line("microturn: Triton ended with code 137; restarting")
    served.wait_for_line("ready in ")
    assert served.turn(2) == ["output_ids", "status"]


def test_a_hung_model_process_is_replaced(serve):
    served = serve("--health-timeout-s", "5")
    served.wait_until_ready()
    hung = served.model_process()
    hung.send_signal(signal.SIGSTOP)
    served.wait_for_health("NOT_SERVING")
    served.wait_for_line("microturn: no health turn was answered")
    served.wait_for_line("ready in ")
    assert not is_alive(hung)
    assert served.health() == "SERVING"


def test_a_server_without_room_is_not_taken_for_dead(serve):
    """Triton lets a sequence beyond its slots wait in silence, which a health turn must not mistake for a death."""
    served = serve("--health-timeout-s", "5")  # a busy machine may let a turn wait for long
    served.wait_until_ready()
    for sequence_id in range(1, 5):  # all that the light model's configuration allows
        served.turn(sequence_id, end=False)
    time.sleep(7)
    assert served.health() == "SERVING"
    assert [line for line in served.said if "restarting" in line] == []


def test_a_crash_loop_ends_with_an_error(serve):
    served = serve()
    served.wait_until_ready()
    for _ in range(4):
        served.model_process().kill()
        served.wait_for_line("ready in ")
    served.model_process().kill()
    assert served.wait_for_exit() == 1
    assert served.said[-1].startswith("microturn: error: gave up after 5 failures in a row, the last: the model")
    assert served.traces() == []


def test_nothing_outlives_a_killed_supervisor(serve, held_stream):
    served = serve()
    served.wait_until_ready()
    held_stream(served)
    tree = served.tree()
    assert len(tree) == 3
    served.process.kill()
    assert alive_after(tree, 60) == []
    assert served.traces() == []


def test_a_killed_warden_takes_the_server_with_it(serve):
    served = serve()
    served.wait_until_ready()
    tree = served.tree()
    (warden,) = [process for process in tree if "microturn.serve.warden" in process.cmdline()]
    warden.kill()
    served.wait_for_line("microturn: Triton ended with code")
    served.wait_for_line("ready in ")
    assert alive_after(tree, 0.1) == []


def test_what_a_killed_run_left_is_removed_by_the_next_start(serve):
    """Supervisor and warden die together, as when a container's memory runs out; another run lives on beside.

    The server dies with its warden. The model process ends by itself unless the server's death met it in a request.
    """
    killed, other = serve(), serve()
    killed.wait_until_ready()
    other.wait_until_ready()
    tree = killed.tree()
    others_tree = other.tree()
    model = killed.model_process()
    (warden,) = [process for process in tree if "microturn.serve.warden" in process.cmdline()]
    killed.process.send_signal(signal.SIGSTOP)
    warden.kill()
    killed.process.kill()
    assert alive_after([process for process in tree if process != model], 60) == []
    leftovers = killed.traces()
    assert leftovers != []
    of_other = other.traces()
    following = serve()
    following.wait_for_line("microturn: removed what a killed run had left: " + leftovers[0].name)
    following.wait_until_ready()
    assert alive_after(tree, 10) == []
    assert killed.traces() == []
    assert other.traces() == of_other
    assert other.tree() == others_tree
    assert other.health() == "SERVING"
