"""Models of many architectures: each is served with the stock model's tokens, or refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from microturn.engine.loading import load_engine
from microturn.errors import InvalidArgument
from microturn.model.runner import Runner
from microturn.settings import Settings
from support.driver import Driver
from support.families import FAMILIES, pristine, pristine_logits, write_family

pytestmark = pytest.mark.usefixtures("one_thread")

_POOL = {
    "kv_tokens": 2048,
    "max_context": 512,
    "weights": "float32",
    "kv_dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
}
_SERVED = {
    "apertus",
    "arcee",
    "bitnet",
    "cohere",
    "cohere2",
    "deepseek_v3",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "glm",
    "glm4",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granite_swa",
    "helium",
    "llama",
    "mimo_v2_flash",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "vaultgemma",
}


def served(directory: Path) -> Runner:
    """The model as a server would run it."""
    return load_engine(Settings(model_dir=str(directory), **_POOL)).runner


def check_tokens(directory: Path, runner: Runner) -> None:
    """Two sessions beside each other, in turns, against a model that nobody has touched."""
    driver = Driver(runner, num_pages=128, max_batch_tokens=64)
    generator = torch.Generator().manual_seed(5)
    histories: dict[int, list[int]] = {1: [], 2: []}
    generated: dict[int, list[int]] = {1: [], 2: []}
    for start, num_given in ((True, 20), (False, 31)):
        recorders = {}
        for session, history in histories.items():
            given = torch.randint(1, runner.vocab_size, (num_given + session,), generator=generator).tolist()
            history += given
            recorders[session], _ = driver.post(session, given, start=start, max_tokens=6, ignore_eos=True)
        driver.run()
        for session, recorder in recorders.items():
            for token_id in recorder.token_ids:
                generated[session].append(len(histories[session]))
                histories[session].append(token_id)
    stock = pristine(directory)
    for session, history in histories.items():
        assert len(generated[session]) == 12
        expected = pristine_logits(stock, history)
        for position in generated[session]:
            row = expected[position - 1]
            assert row.max() - row[history[position]] <= 1e-3, f"token {position} of session {session}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_served_with_the_stock_models_tokens_or_refused_in_words(family: str, tmp_path: Path) -> None:
    """Cohere's models were served with wrong tokens: the check compared with the model as we had changed it.

    Others ended the start with a bare TypeError or RuntimeError, or were refused with `'microturn_paged'`.
    """
    directory = write_family(family, tmp_path / family)
    if family in _SERVED:
        check_tokens(directory, served(directory))
        return
    with pytest.raises(InvalidArgument, match=r"^INVALID_ARGUMENT: \w+ cannot be served: \w+ .+ \w+"):
        served(directory)
