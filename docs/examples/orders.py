"""What the writer and the reader of the example share: the stream and its rows."""

import attrs

import busrep


@attrs.frozen
class OrderChanged:
    """One order has a new state."""

    order: int
    state: str


orders = busrep.Stream("orders", OrderChanged)
