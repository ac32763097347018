"""Who asked what: each visitor's requests and answers, visible to that visitor alone.

Events carry no text, so text has to come from somewhere else: from the handles of the requests that
a visitor submitted. A page gets an unguessable token when it loads, and shows it to read its own
answers. The token never occurs in an event, a log or another visitor's page.
"""

from __future__ import annotations

import secrets
import threading
import time
import zlib
from dataclasses import dataclass, field
from typing import Any

from engine import EngineRunner, RequestHandle, SamplingParams
from visualizer.feed import Feed
from visualizer.limits import Limits, RateLimiter, Refused
from visualizer.sandbox import Sandboxes

MAX_CARDS = 128  # finished ones beyond it go, oldest first
MAX_PROMPT_CHARS = 20_000
GRACE = 20.0  # seconds of silence after which a visitor's running requests end: a lost phone, a crash
FORGET = 1800.0  # seconds of silence after which a visitor's texts are forgotten
POLLS = 40  # a second that all pages together make, at most: each one interrupts the engine
FASTEST, SLOWEST = 0.2, 2.0  # seconds between two polls of a page that has something to see
WATCHING = 3.0  # seconds of silence after which a visitor does not count as watching


@dataclass
class Prompt:
    """One thing to ask: its text as shown, its token ids as computed, and how to sample."""

    text: str
    token_ids: list[int]
    params: SamplingParams


@dataclass
class Card:
    number: int
    text: str
    handle: RequestHandle
    feed: Feed  # of the engine that was asked
    where: str  # "live" | "sandbox"


@dataclass
class Visitor:
    token: str
    last_seen: float
    is_away: bool = False  # the page said that it is hidden, and so will be silent
    cards: dict[int, Card] = field(default_factory=dict)
    next_number: int = 1

    @property
    def num_active(self) -> int:
        return sum(not card.handle.finished for card in self.cards.values())


class Visitors:
    """All visitors, by Gradio session and by token. Safe to use from any thread."""

    def __init__(
        self,
        runner: EngineRunner,
        feed: Feed,
        sandboxes: Sandboxes,
        limits: Limits | None = None,
        clock=time.monotonic,
    ):
        self._runner = runner
        self._feed = feed
        self._sandboxes = sandboxes
        self._limits = limits or Limits()
        self._rate = RateLimiter(self._limits, clock)
        self._clock = clock
        self._lock = threading.RLock()
        self._by_session: dict[str, Visitor] = {}
        self._by_token: dict[str, Visitor] = {}
        self._num_watching = 1

    # -- coming and going -----------------------------------------------------------------------

    def open(self, session: str) -> str:
        """The token of a session's page; a new visitor if the session is new, or was given up."""
        with self._lock:
            visitor = self._by_session.get(session)
            if visitor is None:
                visitor = Visitor(secrets.token_urlsafe(24), self._clock())
                self._by_session[session] = self._by_token[visitor.token] = visitor
            return visitor.token

    def close(self, session: str) -> None:
        """The page is gone: end its running requests, forget its texts, free its sandbox."""
        with self._lock:
            visitor = self._by_session.pop(session, None)
            if visitor is None:
                return
            del self._by_token[visitor.token]
        self._sandboxes.close(visitor.token)
        self._end_running(visitor)

    def knows(self, token: str) -> bool:
        """Whether this is the token of a page that is open."""
        with self._lock:
            return token in self._by_token

    def reap(self) -> None:
        """End what runs for visitors who fell silent, and forget those who stay so.

        A page that is hidden, behind a slide or on a locked phone, says so and polls nothing: its requests
        run on, and its answers wait for it.
        """
        with self._lock:
            now = self._clock()
            watching = [v for v in self._by_token.values() if not v.is_away and v.last_seen > now - WATCHING]
            self._num_watching = len(watching)
            silent = {s: v for s, v in self._by_session.items() if v.last_seen < now - GRACE}
            gone = [s for s, v in silent.items() if v.last_seen < now - FORGET or not (v.cards or v.is_away)]
            lost = [v for s, v in silent.items() if s not in gone and not v.is_away]
        for session in gone:
            self.close(session)
        for visitor in lost:
            self._sandboxes.close(visitor.token)
            self._end_running(visitor)

    @property
    def pace(self) -> float:
        """Seconds between two polls of a page that has something to see: longer, the more pages there are."""
        return min(SLOWEST, max(FASTEST, self._num_watching / POLLS))

    def go_away(self, token: str) -> None:
        """The token's page is hidden from now on, until it polls again."""
        with self._lock:
            if visitor := self._by_token.get(token):
                visitor.last_seen, visitor.is_away = self._clock(), True

    @staticmethod
    def _end_running(visitor: Visitor) -> None:
        for card in list(visitor.cards.values()):
            if not card.handle.finished:
                card.handle.abort()

    # -- asking and stopping ----------------------------------------------------------------------

    def submit(self, session: str, prompts: list[Prompt], client: str = "") -> None:
        """Queue prompts in one go: in the visitor's sandbox while it has one, else in the live engine.

        client: the address they come from, for `Limits.per_minute`.
        Raises Refused, and queues none, if one is bad or there are too many.
        """
        with self._lock:
            visitor = self._by_token[self.open(session)]
            mine = visitor.num_active
            limits = self._limits
            if mine + len(prompts) > limits.active_per_visitor:
                raise Refused(
                    f"You have {mine} requests running or waiting, and {limits.active_per_visitor} is the "
                    "most for one visitor. Wait for some to finish, or stop some."
                )
            everyone = sum(other.num_active for other in self._by_token.values())
            if everyone + len(prompts) > limits.active:
                raise Refused(
                    f"The engine is busy with {everyone} requests of all visitors; {limits.active} is the "
                    "most. Please try again in a moment."
                )
            self._rate.take(client, len(prompts))
            sandbox = self._sandboxes.get(visitor.token, use=True)
            runner, feed = (sandbox.runner, sandbox.feed) if sandbox else (self._runner, self._feed)
            where = "sandbox" if sandbox else "live"
            try:
                handles = runner.submit_all([(prompt.token_ids, prompt.params) for prompt in prompts])
            except ValueError as error:
                raise Refused(f"The engine refused this request: {error}") from error
            for prompt, handle in zip(prompts, handles, strict=True):
                number = visitor.next_number
                visitor.next_number += 1
                visitor.cards[number] = Card(number, prompt.text, handle, feed, where)
            self._drop_oldest(visitor)

    @staticmethod
    def _drop_oldest(visitor: Visitor) -> None:
        finished = [number for number, card in visitor.cards.items() if card.handle.finished]
        for number in finished[: max(0, len(visitor.cards) - MAX_CARDS)]:
            del visitor.cards[number]

    def stop(self, token: str, number: int) -> bool:
        """End one request of the token's visitor. False if it has no such request."""
        with self._lock:
            visitor = self._by_token.get(token)
            card = visitor.cards.get(number) if visitor else None
        if card is None:
            return False
        card.handle.abort()
        return True

    def stop_all(self, session: str) -> None:
        with self._lock:
            visitor = self._by_session.get(session)
            cards = list(visitor.cards.values()) if visitor else []
        for card in cards:
            if not card.handle.finished:
                card.handle.abort()

    def clear_finished(self, session: str) -> None:
        with self._lock:
            if visitor := self._by_session.get(session):
                visitor.cards = {n: card for n, card in visitor.cards.items() if not card.handle.finished}

    # -- what a page is shown -----------------------------------------------------------------------

    def view(self, token: str, have: dict[str, Any]) -> dict[str, Any] | None:
        """A visitor's cards, as far as its page does not have them yet; None for an unknown token.

        `have` maps a card's number to what the page holds of it: how many characters of its answer,
        and the stamp of its state. Answers only grow, so a page is sent the rest, and a state again
        only when it changed.
        """
        with self._lock:
            visitor = self._by_token.get(token)
            if visitor is None:
                return None
            visitor.last_seen, visitor.is_away = self._clock(), False
            cards = list(visitor.cards.values())
        sandbox = self._sandboxes.get(token)
        if sandbox:
            sandbox.feed.tick()
        changed = [self._card(card, _held(have.get(str(card.number)))) for card in cards]
        return {
            "numbers": [card.number for card in cards],
            "cards": [view for view in changed if view is not None],
            "sandbox": self._sandboxes.status(token),
        }

    def _card(self, card: Card, held: tuple[int, int] | None) -> dict[str, Any] | None:
        handle = card.handle
        finished = handle.finished  # before the text: a finished handle has all of it
        text = handle.text
        told = card.feed.request(handle.request_id)
        state = told._asdict() if told else {"state": "waiting", "place": 0}
        state["where"] = card.where
        if finished:
            state |= {"state": "finished", "finish": handle.finish_reason, "error": handle.error}
            state["num_output"] = handle.num_output_tokens
        elif state["state"] == "finished":
            state["state"] = "decode"  # the events are ahead of the handle: its last text comes next
        elif state["place"] == 1:
            state["reason"] = card.feed.wait_reason
        stamp = zlib.crc32(repr(state).encode())
        if held == (len(text), stamp):
            return None
        start = held[0] if held and held[0] <= len(text) else 0
        view = {"number": card.number, "from": start, "more": text[start:], "end": len(text), "stamp": stamp}
        if held is None:
            view["prompt"] = card.text
        return view | {"told": state}


def _held(value: Any) -> tuple[int, int] | None:
    """A page's [characters, stamp] of one card; None, so that it gets the whole, if it is not that."""
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(type(part) is int for part in value)
        and value[0] >= 0
    ):
        return value[0], value[1]
    return None
