"""Mistakes that a type checker finds; each line that has one says so. Checked by `test_types.py`, never run."""

from microturn_client import AsyncClient, Client, Status, TurnOptions


def talk(client: Client) -> None:
    session = client.session(overflow="window", history="whole", on_overlap="queue", logprobs=True)
    client.session(overflow="wndow")  # wrong: arg-type
    client.session(history="all")  # wrong: arg-type
    client.session(on_overlap="stop")  # wrong: arg-type
    client.session(max_contxt=512)  # wrong: call-arg
    client.session(role="user")  # wrong: call-arg
    session.append("Hello", role="user")
    session.append("Hello", role="human")  # wrong: arg-type
    session.append("Hello", on_overlap="interupt")  # wrong: arg-type
    session.append("Hello", max_tokens=3)  # wrong: call-arg
    session.turn(role="assistant", max_tokens=8)
    session.turn(role="assitant")  # wrong: arg-type
    session.turn(max_token=8)  # wrong: call-arg
    session.turn(3.5)  # wrong: arg-type
    session.ask("Hello", max_tokens=8).text()
    session.ask("Hello", max_token=8)  # wrong: call-arg
    session.ask("Hello", on_overlap="wait")  # wrong: arg-type
    options: TurnOptions = {"role": "tool", "max_tokens": 8}
    mistaken: TurnOptions = {"role": "tools", "max_tokens": 8}  # wrong: typeddict-item
    session.turn(**options)
    session.turn(**mistaken)
    list(session.stream(["a"], role="bot"))  # wrong: arg-type


async def talk_in_a_task(client: AsyncClient) -> None:
    session = client.session(overflow="never")  # wrong: arg-type
    await session.append("Hello", role="human")  # wrong: arg-type
    session.turn(on_overlap="wait")  # wrong: arg-type


def told(status: Status) -> str:
    if status.finish_reason == "done":  # wrong: comparison-overlap
        return "it is said to be done"
    match status.finish_reason:
        case "length" | "stop" | "complete" | "append" | "closed" | "cancelled" | "interrupted" | "deadline":
            return status.finish_reason
