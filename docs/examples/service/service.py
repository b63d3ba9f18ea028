"""Orders, and a search index over them in another process: a service small enough to show how it is tested."""

from __future__ import annotations

import attrs

import busrep


@attrs.frozen
class Order:
    """What an order says now; None: it was withdrawn."""

    number: int
    text: str | None


@attrs.frozen
class Bookmark:
    """A place in the stream: who has read up to it has seen the order that gave it."""

    writer: str
    token: int


orders = busrep.Stream("orders", Order)


class Desk:
    """Takes orders. Several may run, each with a writer's name of its own."""

    def __init__(self, bus: busrep.Bus) -> None:
        self.bus = bus

    async def place(self, number: int, text: str | None) -> Bookmark:
        """Write the order down; the bookmark is for whoever looks for it next."""
        async with self.bus.write(orders) as fact:
            fact.add(Order(number, text))
        return Bookmark(self.bus.writer or "", fact.id)


class SearchIndex:
    """Finds orders by their words. Its bus has to start with the oldest order: the index is in memory."""

    def __init__(self, bus: busrep.Bus) -> None:
        self.bus = bus
        self.words: dict[str, set[int]] = {}
        self.texts: dict[int, str] = {}
        bus.subscribe(orders)(self.apply)

    def apply(self, batch: busrep.Batch[Order]) -> None:
        """Take changes of orders in."""
        for order in batch.rows:
            for word in words(self.texts.pop(order.number, "")):
                self.words[word].discard(order.number)
            if order.text is not None:
                self.texts[order.number] = order.text
                for word in words(order.text):
                    self.words.setdefault(word, set()).add(order.number)

    async def find(self, word: str, after: Bookmark | None = None, timeout: float = 5.0) -> list[int]:
        """The numbers of orders with this word; ``after``: not before that order is in the index."""
        if after is not None:
            await self.bus.wait_for(orders, after.writer, after.token, timeout)
        return sorted(self.words.get(word.casefold(), ()))


def words(text: str) -> set[str]:
    """The words of a text, in one spelling."""
    return set(text.casefold().split())
