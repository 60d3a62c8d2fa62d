"""The main job, over real gRPC: sessions in turns equal plain transformers."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from microturn_client import AsyncClient, Client, Status, Tokens, TurnEnd
from microturn_client import Session as ClientSession
from support.oracle import stock_greedy


def run_turn(session: ClientSession, given: object, **options: object) -> tuple[list[int], str, Status]:
    """One turn's ids, text and status."""
    token_ids: list[int] = []
    text = ""
    for event in session.turn(given, **options):
        match event:
            case Tokens():
                token_ids += event.ids
                text += event.text
            case TurnEnd(status):
                return token_ids, text, status
    raise AssertionError("the turn did not end")


def test_eight_interleaved_sessions_equal_plain_generate(client: Client, smollm2: PreTrainedModel) -> None:
    prompts = [random.Random(n).choices(range(1000, 40_000), k=40 + 11 * n) for n in range(8)]

    def talk(prompt: list[int]) -> list[int]:
        cuts = sorted(random.Random(len(prompt)).sample(range(1, len(prompt)), 4))
        parts = [prompt[first:last] for first, last in zip([0, *cuts], [*cuts, len(prompt)], strict=True)]
        with client.session() as session:
            for part in parts[:-1]:
                session.append(part)
            generated, _, status = run_turn(session, parts[-1], max_tokens=10, ignore_eos=True)
            generated += run_turn(session, None, max_tokens=14, ignore_eos=True)[0]
            assert status.context_len == len(prompt) + 10
            return generated

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(talk, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == stock_greedy(smollm2, prompt, 24)


async def test_the_asyncio_client_gets_the_same(server: str, smollm2: PreTrainedModel) -> None:
    prompt = list(range(2000, 2040))
    async with AsyncClient(server) as client, client.session() as session:
        await session.append(prompt[:25])
        got = [
            token_id
            async for event in session.turn(prompt[25:], max_tokens=12, ignore_eos=True)
            if isinstance(event, Tokens)
            for token_id in event.ids
        ]
    assert got == stock_greedy(smollm2, prompt, 12)


def test_embeddings_give_the_tokens_of_their_ids(client: Client, smollm2: PreTrainedModel) -> None:
    prompt = list(range(3000, 3030))
    embeds = smollm2.get_input_embeddings()(torch.tensor(prompt)).detach().numpy().astype(np.float32)
    with client.session() as session:
        session.append(embeds[:17])
        by_embeds, _, status = run_turn(session, embeds[17:], max_tokens=12, ignore_eos=True)
    assert by_embeds == stock_greedy(smollm2, prompt, 12)
    assert status.usage.input_tokens == 13


def test_a_chat_by_role_is_the_template_wherever_it_is_cut(client: Client, tokenizer: PreTrainedTokenizerFast) -> None:
    said = "Hello there,  what is 12+30?\nAnd why, s'il vous plaît? 🙂 "
    conversation = [
        {"role": "user", "content": said},
        {"role": "assistant", "content": "It is 42."},
        {"role": "user", "content": "Thanks!"},
    ]
    expected = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    for seed in range(5):
        rng = random.Random(seed)
        with client.session(return_appended_ids=True) as session:
            appended: list[int] = []
            for message in conversation:
                content = message["content"]
                cuts = sorted(rng.sample(range(1, len(content)), min(6, len(content) - 1)))
                for first, last in zip([0, *cuts], [*cuts, len(content)], strict=True):
                    appended += session.append(content[first:last], role=message["role"]).appended_ids or ()
            generated, _, status = run_turn(session, None, role="assistant", max_tokens=4)
            appended += status.appended_ids or ()
        assert appended == expected
        assert generated


def test_an_answer_in_turns_is_the_answer_in_one(client: Client, tokenizer: PreTrainedTokenizerFast) -> None:
    """The end token that the model wrote is not written again when the template closes its message."""
    with client.session(return_appended_ids=True) as session:
        first = session.append("Say hello.", role="user")
        ids, text, answer = run_turn(session, None, role="assistant", max_tokens=60)
        last = session.append("And again. ", role="user")
        assert answer.finish_reason == "stop"
        assert text == tokenizer.decode(ids, skip_special_tokens=True)
        assert session.context_len == sum(
            len(part) for part in (first.appended_ids, answer.appended_ids, ids, last.appended_ids)
        )
    transcript = [*first.appended_ids, *answer.appended_ids, *ids, *last.appended_ids]
    assert tokenizer.decode(transcript).count("<|im_end|>") == 3, "of the system's, the user's and the answer's message"


def test_seeded_sampling_is_the_same_in_company_and_in_turns(client: Client) -> None:
    options = {"temperature": 0.8, "top_p": 0.9, "seed": 77, "ignore_eos": True}
    prompt = list(range(5000, 5020))
    with client.session(**options) as session:
        alone = run_turn(session, prompt, max_tokens=24)[:2]

    def disturb(number: int) -> None:
        with client.session(temperature=1.3) as session:
            run_turn(session, prompt[number:], max_tokens=40, ignore_eos=True)

    with ThreadPoolExecutor(3) as pool, client.session(**options) as session:
        others = [pool.submit(disturb, number) for number in range(3)]
        parts = [run_turn(session, prompt, max_tokens=9), run_turn(session, None, max_tokens=15)]
        for other in others:
            other.result()
    assert (parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]) == alone


def test_stop_strings_logprobs_and_ids_of_a_turn(client: Client, tokenizer: PreTrainedTokenizerFast) -> None:
    with client.session() as session:
        text = ""
        logprobs: list[float] = []
        for event in session.turn(
            "Count: one, two, three,", max_tokens=40, stop=["six", "seven"], logprobs=True, return_appended_ids=True
        ):
            match event:
                case Tokens():
                    text += event.text
                    logprobs += event.logprobs or ()
                case TurnEnd(status):
                    pass
    assert (status.finish_reason, status.stop_reason) == ("stop", "six")
    assert text == " four, five, "
    assert len(logprobs) == status.usage.output_tokens
    assert all(value <= 0 for value in logprobs)
    assert list(status.appended_ids or ()) == tokenizer.encode("Count: one, two, three,")
