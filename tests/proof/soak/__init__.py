"""A deployment of real processes on real servers, under all the faults that real life has, judged by the table.

::

    python -m tests.proof.soak --minutes 20 --seed 7

Start here::

    run.py       the run: processes up, faults by dice, everything healed, every reader at the end, the verdict
    world.py     what it runs on: two Redis servers under a Sentinel, PostgreSQL and a replica, links that fail
    faults/      the faults, one function each
    child.py     a writer or reader process
    runtime.py   its bus on an event loop, or in threads: load and handlers are one text for both
    ledger.py    what a process notes of what it did, so that a kill leaves the truth
    verdict.py   the ledgers compared with the table. Pure.
"""
