"""The gateway or the server behind it is restarted: the page says so, comes back, and goes on with the talk."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from microturn.serve.child import free_ports
from support.chromium import Page, chromium
from support.gateway_command import gateway_command
from support.page_user import STATE, ask, come, hear_all, number, set_field, text
from support.share import model_server

WORDS = "document.getElementById('trouble-words').textContent"


def shorten(page: Page) -> None:
    page.click("#open-settings")
    set_field(page, "max-tokens", 20)
    set_field(page, "compare", False)
    page.click("#settings button.main")


def test_a_restarted_gateway_is_told_the_talk_again(server: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with chromium(tmp_path) as page:
        with gateway_command(server, port) as address:
            come(page, address)
            shorten(page)
            ask(page, "I have a small garden. What should I plant?")
            hear_all(page, 1)
            held = number(page, "#context")
            page.type("And in ")
            page.wait_for("document.querySelectorAll('#landed span').length >= 1")
        # Either is true for a while: the connection broke, and the gateway was not there when it was tried again.
        page.wait_for(f"/^(The connection to the gateway broke|The gateway does not answer)/.test({WORDS})")
        page.wait_for("document.getElementById('send').disabled && !document.getElementById('reconnect').hidden")
        page.type("the shade?")  # nothing that is typed meanwhile is lost
        with gateway_command(server, port):
            page.click("#reconnect")
            page.wait_for(f"{STATE} === 'ready' && document.getElementById('trouble').hidden")
            page.wait_for("document.getElementById('landed').textContent === 'And in the shade?'")
            assert page.value("document.activeElement.id") == "input"
            # Behind the talk, which another session holds now, as long as it was.
            assert held <= number(page, "#context") < held + 20
            page.press("Enter")
            hear_all(page, 2)
            assert text(page, ".user") == "And in the shade?"
            assert number(page, "#context") > held
            cached, prompt = number(page, "#cached-session"), int(text(page, "#cached-session").split()[-1])
            assert held < prompt < cached + 20


def test_a_restarted_server_is_waited_for_and_told_the_talk_again(smollm2_dir: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        page = stack.enter_context(chromium(tmp_path))
        with ExitStack() as first:
            server = first.enter_context(model_server(smollm2_dir)).address
            come(page, stack.enter_context(gateway_command(server)))
            shorten(page)
            ask(page, "I have a small garden. What should I plant?")
            hear_all(page, 1)
            held = number(page, "#context")
        page.type("And in the shade?")
        page.wait_for(f"{WORDS}.length > 0")
        assert text(page, "#trouble-words").split(".")[0] in (
            "The model’s server has been silent for a while",
            "The model’s server does not answer",
            "The server no longer has this session; it may have been restarted",
        )
        port = server.rpartition(":")[2]
        stack.enter_context(model_server(smollm2_dir, arguments=("--grpc-port", port)))
        page.wait_for(f"{STATE} === 'ready' && document.getElementById('trouble').hidden")  # by itself
        page.wait_for("document.getElementById('landed').textContent === 'And in the shade?'")
        assert held <= number(page, "#context") < held + 20
        page.press("Enter")
        hear_all(page, 2)
        assert number(page, "#context") > held
