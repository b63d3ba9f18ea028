"""The protocol without I/O: no socket, no clock, no SQL and no thread.

Lines are parsed by `commands` and `framing`. `admission` tells whose lines count. `reader` decides what becomes of the
lines, `delivery` queues the rows for handlers, `catchup` says what to fetch, and `handled` what counts as handled.
`ids` and `writer` are the writing half: `chain` orders the facts of a stream. `bootstrap` loads snapshots, `direct`
relays over TCP, and `retained` keeps what commands are to be answered from.
"""
