"""A core and the sessions of the fake server, stepped by hand in any order, and what turns should have come to."""

from collections import deque
from dataclasses import replace

from microturn_client import ConnectionLost, Recovery, Resumed, Tokens, TurnEnd
from microturn_client._inputs import encode_input
from microturn_client._lifecycle import SessionState
from microturn_client._opening import begin_branch
from microturn_client._requests import Requests
from microturn_client._session_core import SessionCore
from microturn_client.testing._fake_model import encode, next_token, split_at_boundary
from microturn_client.testing._fake_sessions import FakeSessions
from microturn_client.testing._messages import error

SEED = 5
PATIENT = Recovery(give_up_after_s=1e9, give_up_opening_s=1e9)


class Scene:
    """One core and one server, and what is on the way between them."""

    def __init__(self, recovery=PATIENT, sessions=None):
        self.now_s = 0.0
        self.sessions = sessions or FakeSessions(lambda: self.now_s)
        requests = Requests("m", 1, {"session_key": "k", "seed": SEED}, is_recorded=recovery is not None)
        self.core = SessionCore(requests, lambda: self.now_s, recovery=recovery)
        self.is_up = True
        self.cut()

    def cut(self):
        """The stream is gone, with all that was on the way."""
        if getattr(self, "send", None):
            self.sessions.drop(self.send)
        self.up, self.down = [], []
        self.send = None
        self.is_mute = False
        self.lost = set()

    def go_mute(self):
        """The stream lives, and nothing that is on the way or will be sent gets through."""
        self.up, self.down = [], []
        self.is_mute = self.send is not None

    def lose_answer(self, request_id):
        """What the server still says to one request gets lost."""
        self.lost.add(request_id)

    def flush(self):
        if not self.core.wants_stream:
            self.cut()
        requests = self.core.requests_to_send()
        if requests and not self.is_up:
            self.core.connection_lost(ConnectionLost("nothing listens there"))
        elif requests:
            if self.send is None:
                self.send = self.down.append
            if not self.is_mute:
                self.up += requests

    def begin(self, given, **options):
        turn = self.core.begin_turn(encode_input(given), options, 1e9)
        self.flush()
        return turn

    def deliver_up(self):
        if self.up:
            self.sessions.take(self.up.pop(0), self.send)

    def deliver_down(self):
        if self.down:
            message = self.down.pop(0)
            if not self.is_mute and message.infer_response.id not in self.lost:
                self.core.receive(message)
                self.flush()

    def wait(self):
        if self.core.wake_at is not None:
            self.now_s = max(self.now_s, self.core.wake_at)
        self.core.tick()
        self.flush()

    def break_stream(self):
        self.cut()
        self.core.connection_lost(ConnectionLost("the stream broke"))
        self.flush()

    def kill(self):
        self.sessions.forget_sessions()
        self.break_stream()

    def settle(self):
        self.flush()
        for _ in range(100_000):
            if self.up:
                self.deliver_up()
            elif self.down:
                self.deliver_down()
            elif self.sessions.is_busy:
                self.sessions.step()
            elif self.core.wake_at is not None and self.is_waiting:
                self.wait()
            else:
                return
        raise AssertionError("it never comes to rest")

    @property
    def is_waiting(self):
        """Whether the core wants an answer, or to try again."""
        return self.core.lifecycle.state is SessionState.BROKEN or self.core.outbox.has_sent_any

    @property
    def context(self):
        return self.sessions.context_of(1)


class BranchScene(Scene):
    """A branch of another scene's session, at the same server and time; its first turn is not sent yet."""

    def __init__(self, parent, number=2):
        self._parent = parent
        super().__init__(sessions=parent.sessions)
        self.core, self.opening = begin_branch(parent.core, number, 1e9)

    @property
    def now_s(self):
        return self._parent.now_s

    @now_s.setter
    def now_s(self, now_s):
        self._parent.now_s = max(self._parent.now_s, now_s)


class SavingScene(Scene):
    """A server that saves its session; what it is sent is noted."""

    def __init__(self, recovery=PATIENT):
        super().__init__(recovery)
        self.taken = []
        take = self.sessions.take
        self.sessions.take = lambda message, send: (self.taken.append(dict(message.parameters)), take(message, send))

    def save(self, session=None):
        """The session as of its last turn that ended."""
        session = session or self.sessions._sessions[1]
        running, copied = session.running, {"running": None, "queue": deque(), "results": dict(session.results)}
        context, held, marks = (session.context, session.held, session.marks) if running is None else running.before
        num_turns = session.num_turns if running is None else running.number
        return replace(session, context=context[:], held=held, marks=marks[:], num_turns=num_turns, **copied)

    def fall_back_to(self, saved):
        """The server is killed, and another one goes on with what was saved."""
        self.taken.clear()
        self.sessions.forget_sessions()
        self.sessions._sessions[1] = self.save(saved)
        self.break_stream()

    def say(self, given_, num_tokens=0, temperature=0, **options):
        turn = self.begin(given_, max_tokens=num_tokens, temperature=float(temperature), **options)
        self.settle()
        return turn

    def refuse_third(self, text):
        """The second turn of catching up is refused, once; the empty turn that asks comes before these."""
        take, num_taken = self.sessions.take, [0]

        def refuse(message, send):
            num_taken[0] += 1
            if num_taken[0] == 3:
                self.taken.append(dict(message.parameters))
                send(error(message.id, text))
            else:
                take(message, send)

        self.sessions.take = refuse

    @property
    def was_opened_anew(self):
        return any("sequence_start" in said and "resume" not in said for said in self.taken)

    @property
    def numbers(self):
        """Of the turns that were sent; None for each that only asks or is told."""
        return [said["turn"].int64_param if "turn" in said else None for said in self.taken]


def events(turn):
    return list(iter(turn.next_event, None))


def told(turn):
    return [event for event in events(turn) if isinstance(event, Resumed)]


def ids(happened):
    return [token_id for event in happened if isinstance(event, Tokens) for token_id in event.ids]


def expected_of(turns):
    """The context and the answers, where turns are done one after the other: (input, tokens, temperature) each."""
    context, held, answers = [], "", []
    for given_, num_tokens, temperature in turns:
        if isinstance(given_, str):
            text = held + given_
            certain, held = (text, "") if num_tokens else split_at_boundary(text)
            context += encode(certain)
        elif given_ or num_tokens:
            context += [*encode(held), *given_]
            held = ""
        answer = []
        for _ in range(num_tokens):
            answer.append(next_token(context, SEED if temperature else 0))
            context.append(answer[-1])
        answers.append(answer)
    return context, answers


class Talk:
    """Random turns, of which some are left."""

    def __init__(self, chance):
        self.chance = chance
        self.scene = Scene()
        self.turns = []
        self.said = []
        self.heard = []

    def run(self):
        for _ in range(self.chance.randint(5, 60)):
            acts = [self.say, self.say, self.say, self.read, self.read, self.leave, self.fail, self.pass_on]
            self.chance.choice([*acts, self.pass_on])()
        self.scene.settle()
        for _ in range(3):
            self.scene.wait()
            self.scene.settle()

    def check_all_done_once(self):
        """Each turn that was not left has heard what it would have heard undisturbed, and the contexts are right."""
        context, answers = expected_of(self.said)
        for turn, heard, answer in zip(self.turns, self.heard, answers, strict=True):
            if turn.is_left:
                continue
            heard += events(turn)
            assert ids(heard) == answer
            assert "".join(event.text for event in heard if isinstance(event, Tokens)) == bytes(answer).decode()
            assert isinstance(heard[-1], TurnEnd)
            assert all(event.same_tokens for event in heard if isinstance(event, Resumed))
        if self.turns:
            assert self.scene.context == context
            assert self.scene.core.context_len == len(context)

    def say(self):
        if sum(turn.result is None or turn.is_held for turn in self.turns) >= 7:
            return
        is_text = self.chance.random() < 0.5
        given_ = self.chance.choice(["ab", "a b", " c", "de ", "f"]) if is_text else self.chance.choices(range(99), k=2)
        num_tokens, temperature = self.chance.choice([0, 0, 1, 3, 8]), self.chance.choice([0.0, 1.0])
        self.said.append((given_, num_tokens, temperature))
        self.heard.append([])
        self.turns.append(self.scene.begin(given_, max_tokens=num_tokens, temperature=temperature))

    def read(self):
        """The next event of the first turn that has one; nobody reads behind an answer that is being cut."""
        for turn, heard, (_, num_tokens, _) in zip(self.turns, self.heard, self.said, strict=True):
            if turn.is_left and num_tokens and not turn.is_settled and len(turn.ids) > turn.num_handed:
                return
            if turn.is_left:
                continue
            event = turn.next_event()
            if event is not None:
                heard.append(event)
            if event is not None or not turn.is_over:
                return

    def leave(self):
        """Leaves the last turn that answers, unless what came behind it is known to somebody."""
        if self.scene.core.lifecycle.state is not SessionState.OPEN:
            return
        for number in reversed(range(len(self.turns))):
            turn, (given_, num_tokens, temperature) = self.turns[number], self.said[number]
            later = self.turns[number + 1 :]
            if turn.num_handed or any(after.result is not None for after in later) or turn.is_left:
                return
            if num_tokens and not isinstance(given_, str):
                turn.leave()
                self.said[number] = (given_, turn.num_handed, temperature)
                self.scene.flush()
                return

    def fail(self):
        if self.chance.random() < 0.5:
            scene = self.scene
            failures = [scene.break_stream, scene.kill, scene.sessions.forget_sequences, scene.go_mute]
            self.chance.choice([*failures, self.lose])()

    def lose(self):
        if self.scene.up:
            self.scene.lose_answer(self.chance.choice(self.scene.up).id)

    def pass_on(self):
        scene = self.scene
        steps = [scene.deliver_up, scene.deliver_up, scene.deliver_down, scene.deliver_down, scene.sessions.step]
        for _ in range(self.chance.randint(1, 12)):
            self.chance.choice([*steps, scene.wait])()
