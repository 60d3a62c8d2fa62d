"""The life of ``microturn serve``: ready, restarts, stop, and what is left when it is killed."""

from __future__ import annotations

import queue
import signal
import time

import pytest
from tritonclient.grpc import service_pb2_grpc

from microturn.process_tree import is_alive
from support.processes import alive_after


@pytest.fixture
def held_stream():
    """Opens streams that a client keeps open, which is what Triton waits for when it stops."""
    requests: queue.SimpleQueue = queue.SimpleQueue()
    calls = []

    def hold(served) -> None:
        triton = service_pb2_grpc.GRPCInferenceServiceStub(served.channel)
        calls.append(triton.ModelStreamInfer(iter(requests.get, None)))

    yield hold
    for call in calls:
        requests.put(None)
        call.cancel()


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
    assert served.process.wait(15) == 0
    assert served.traces() == []
    assert alive_after(tree, 0.1) == []
    assert "microturn: starting Triton" in served.said
    assert served.said[-1] == "microturn: stopped"


def test_sessions_go_on_until_proxies_have_noticed(serve):
    """Who was told to move before its proxy knew came back to the server that it was to leave."""
    served = serve("--drain-notice-s", "4")
    served.wait_until_ready()
    served.process.send_signal(signal.SIGTERM)
    served.wait_for_health("NOT_SERVING", 2)
    assert served.turn(1) == ["output_ids", "status"]
    assert served.process.wait(15) == 0


def test_a_stop_says_unhealthy_at_once_and_does_not_wait_for_open_streams(serve, held_stream):
    """Triton hangs past its own timeout as long as a client keeps a stream open."""
    served = serve("--grace-s", "3")
    served.wait_until_ready()
    held_stream(served)
    assert served.health() == "SERVING"
    tree = served.tree()
    stopped_s = time.monotonic()
    served.process.send_signal(signal.SIGTERM)
    served.wait_for_health("NOT_SERVING", 1)
    assert served.process.poll() is None
    assert served.process.wait(8) == 0
    assert time.monotonic() - stopped_s < 6
    assert "microturn: the grace time is over, and streams may still be open: ending them" in served.said
    assert served.traces() == []
    assert alive_after(tree, 0.1) == []


def test_a_second_signal_ends_the_grace(serve, held_stream):
    served = serve("--grace-s", "60")
    served.wait_until_ready()
    held_stream(served)
    served.process.send_signal(signal.SIGINT)
    served.wait_for_line("microturn: stopping")
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(8) == 0
    assert served.traces() == []


def test_a_stop_while_starting_needs_no_patience(serve):
    served = serve()
    served.wait_for_line("microturn: starting")
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(5) == 0


def test_a_killed_model_process_is_replaced(serve):
    """Triton stays ready, answers 'not healthy' and never restarts it."""
    served = serve()
    served.wait_until_ready()
    dead = served.model_process()
    killed_s = time.monotonic()
    dead.kill()
    served.wait_for_line(f"microturn: the model process {dead.pid} died; restarting", 2)
    served.wait_for_line("ready in ", 10)
    assert time.monotonic() - killed_s < 10
    assert served.health() == "SERVING"
    assert served.turn(2) == ["output_ids", "status"]
    assert len([file for file in served.traces() if not file.is_dir()]) == 2  # the dead one's memory is gone


def test_a_killed_server_is_replaced(serve):
    served = serve()
    served.wait_until_ready()
    (triton,) = [process for process in served.tree() if process.name() == "tritonserver"]
    triton.kill()
    served.wait_for_line("microturn: Triton ended with code 137; restarting", 2)
    served.wait_for_line("ready in ", 10)
    assert served.turn(2) == ["output_ids", "status"]


def test_a_hung_model_process_is_replaced(serve):
    served = serve("--health-timeout-s", "3")
    served.wait_until_ready()
    hung = served.model_process()
    hung.send_signal(signal.SIGSTOP)
    served.wait_for_health("NOT_SERVING", 5)
    served.wait_for_line("microturn: no health turn was answered", 5)
    served.wait_for_line("ready in ", 10)
    assert not is_alive(hung)
    assert served.health() == "SERVING"


def test_a_server_without_room_is_not_taken_for_dead(serve):
    """Triton lets a sequence beyond its slots wait in silence, which a health turn must not mistake for a death."""
    served = serve("--health-timeout-s", "2")
    served.wait_until_ready()
    for sequence_id in range(1, 5):  # all that the light model's configuration allows
        served.turn(sequence_id, end=False)
    time.sleep(3.5)
    assert served.health() == "SERVING"
    assert [line for line in served.said if "restarting" in line] == []


def test_a_crash_loop_ends_with_an_error(serve):
    served = serve()
    served.wait_until_ready()
    for _ in range(4):
        served.model_process().kill()
        served.wait_for_line("ready in ", 10)
    served.model_process().kill()
    assert served.process.wait(10) == 1
    assert served.said[-1].startswith("microturn: error: gave up after 5 failures in a row, the last: the model")
    assert served.traces() == []


def test_nothing_outlives_a_killed_supervisor(serve, held_stream):
    served = serve()
    served.wait_until_ready()
    held_stream(served)
    tree = served.tree()
    assert len(tree) == 3
    served.process.kill()
    assert alive_after(tree, 10) == []
    assert served.traces() == []


def test_a_killed_warden_takes_the_server_with_it(serve):
    served = serve()
    served.wait_until_ready()
    tree = served.tree()
    (warden,) = [process for process in tree if "microturn.serve.warden" in process.cmdline()]
    warden.kill()
    served.wait_for_line("microturn: Triton ended with code", 2)
    served.wait_for_line("ready in ", 10)
    assert alive_after(tree, 0.1) == []


def test_what_a_killed_run_left_is_removed_by_the_next_start(serve):
    """Supervisor and warden die together, as when a container's memory runs out; another run lives on beside."""
    killed, other = serve(), serve()
    killed.wait_until_ready()
    other.wait_until_ready()
    tree = killed.tree()
    (warden,) = [process for process in tree if "microturn.serve.warden" in process.cmdline()]
    killed.process.send_signal(signal.SIGSTOP)
    warden.kill()
    killed.process.kill()
    assert alive_after(tree, 10) == []
    leftovers = killed.traces()
    assert leftovers != []
    of_other = other.traces()
    following = serve()
    following.wait_for_line("microturn: removed what a killed run had left: " + leftovers[0].name)
    following.wait_until_ready()
    assert killed.traces() == []
    assert other.traces() == of_other
    assert other.health() == "SERVING"
