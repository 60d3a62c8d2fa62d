"""Images and sound through the real server: the programs of docs/media.md, the tokens, and what hours leave behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoProcessor

from microturn.serve.child import RunningServer
from microturn.zoo.cache import default_cache_dir
from microturn_client import Client, Recovery
from microturn_client.media import MediaEncoder
from support import media_checkpoints
from support.media_checkpoints import PLACEHOLDERS, Processed
from support.programs import IMAGES, SERVER, SOUND, printed_by, programs_for
from support.scrape import scrape_until
from support.served import sessions_command
from support.share import IN_FLOAT32, model_server
from support.whole_model import WholeModel

HEARTBEAT = "microturn_heartbeat_timestamp_seconds"
NUM_SECONDS, WINDOW_TOKENS, HISTORY_BYTES, TRANSCRIPT_BYTES = 240, 150, 1 << 16, 1 << 17


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Language parts go to a directory of the test; kernels are those that there are."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("NUMBA_CACHE_DIR", str(default_cache_dir() / "kernels"))
        patched.setenv("MICROTURN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return media_checkpoints.idefics3(tmp_path_factory.mktemp("images") / "idefics3")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return media_checkpoints.qwen2_audio(tmp_path_factory.mktemp("sound") / "qwen2_audio")


@pytest.fixture(scope="module")
def admin_socket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of the server of sound."""
    return tmp_path_factory.mktemp("admin") / "admin.sock"


@pytest.fixture(scope="module")
def servers(images: Path, sound: Path, admin_socket: Path) -> Iterator[tuple[RunningServer, RunningServer]]:
    """Of images and of sound; they start at once, which takes less time."""
    bounded, arguments = f"history_bytes={HISTORY_BYTES}", (f"--admin-socket={admin_socket}",)
    both = [
        model_server(str(images), *IN_FLOAT32, "kv_tokens=8192"),
        model_server(str(sound), *IN_FLOAT32, "kv_tokens=8192", bounded, arguments=arguments),
    ]
    with ExitStack() as running, ThreadPoolExecutor() as pool:
        of_images, of_sound = pool.map(running.enter_context, both)
        yield of_images, of_sound


@pytest.fixture(scope="module")
def image_server(servers: tuple[RunningServer, RunningServer]) -> RunningServer:
    return servers[0]


@pytest.fixture(scope="module")
def sound_server(servers: tuple[RunningServer, RunningServer]) -> RunningServer:
    return servers[1]


def _printed(need: str, server: RunningServer, checkpoint: Path) -> str:
    [program] = programs_for(need).values()
    return printed_by(program.replace(SERVER, server.address).replace(f'"{need}"', repr(str(checkpoint))))


def test_the_programs_of_the_page(
    image_server: RunningServer, sound_server: RunningServer, images: Path, sound: Path
) -> None:
    with ThreadPoolExecutor() as pool:
        needs, servers, checkpoints = (IMAGES, SOUND), (image_server, sound_server), (images, sound)
        seen, heard = pool.map(_printed, needs, servers, checkpoints)
    assert "the first is" in seen
    assert "another is" in seen
    context_len, *_, kept_len = (int(word) for word in heard.splitlines()[-1].split() if word.isdecimal())
    assert context_len > 20 * 27
    assert kept_len < 600


def test_text_between_images_gives_the_tokens_of_the_whole_model(image_server: RunningServer, images: Path) -> None:
    encoder, whole, rng = MediaEncoder(images), WholeModel(images), np.random.default_rng(8)
    processor = AutoProcessor.from_pretrained(images)
    process = Processed(processor)
    with Client(image_server.address) as client, client.session(ignore_eos=True) as session:
        for number, prompt in enumerate(["Here <image> and there <image> so", " or <image>"]):
            inputs = process(prompt, rng, begins=number == 0)
            whole.hear(inputs)
            for piece in encoder.pieces(inputs):
                session.append(piece)
            session.append(" says the fox")
            whole.say(processor.tokenizer(" says the fox", add_special_tokens=False)["input_ids"])
            answer = session.turn(max_tokens=6).collect()
            assert list(answer.ids) == whole.generate(6)
            whole.say(list(answer.ids))
        assert session.context_len == len(whole.context)


def test_what_a_session_without_end_leaves_is_bounded_everywhere(
    sound_server: RunningServer, sound: Path, admin_socket: Path, tmp_path: Path
) -> None:
    """A session in a window hears four minutes; with these bounds that is as hours are with those of a user."""
    encoder, rng = MediaEncoder(sound), np.random.default_rng(9)
    process = Processed(AutoProcessor.from_pretrained(sound))
    seconds = [encoder.pieces(process(PLACEHOLDERS["qwen2_audio"], rng, begins=False))[1] for _ in range(3)]
    recovery = Recovery(max_transcript_bytes=TRANSCRIPT_BYTES)
    windowed = {"overflow": "window", "window_tokens": WINDOW_TOKENS, "ignore_eos": True}
    most_kept_len = 0
    with (
        Client(sound_server.address, recovery=recovery) as client,
        client.session(session_id="endless", **windowed) as session,
    ):
        for embeds in islice(cycle(seconds), NUM_SECONDS):
            status = session.turn(embeds, max_tokens=1).wait()
            most_kept_len = max(most_kept_len, status.kept_len)
        exported = sessions_command(admin_socket, "export", "endless", tmp_path / "talk")
        assert exported.returncode == 0, exported.stderr
        # The server gives its figures now and then; those of the talk itself may be from before inputs were forgotten.
        ended_s = time.time()
        page = scrape_until(sound_server.metrics_url, lambda page: page.sum(HEARTBEAT) > ended_s)
        transcript = session.transcript
    embedding_bytes = 4 * encoder.hidden_size
    assert status.context_len == NUM_SECONDS * 26
    assert most_kept_len < 3 * WINDOW_TOKENS
    input_bytes = HISTORY_BYTES + most_kept_len * (embedding_bytes + 4)
    assert input_bytes < NUM_SECONDS * 25 * embedding_bytes / 5, "this test is too short to show anything"
    assert 0 < page.sum("microturn_input_bytes") <= input_bytes
    assert (tmp_path / "talk").stat().st_size <= input_bytes + 8192
    assert 0 < sum(len(turn.input_ids) for turn in transcript) * embedding_bytes <= TRANSCRIPT_BYTES
    assert transcript[-1].position == (NUM_SECONDS - 1) * 26
