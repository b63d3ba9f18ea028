"""A near cache under faults, beside the ordinary way of invalidating one, judged by shared memory.

::

    python -m tests.proof.stale --reads 10000000 --seed 7

Writer processes change rows and invalidate them in the same transaction; reader processes call a cached loader again
and again, on `bus.cached` and on the ordinary way (PUBLISH the key, delete on receipt), in the same processes, over the
same links, under the same faults. A read is *stale* when it returns what a commit had replaced longer than the bound
before the read began. Start here::

    run.py        the run: processes up, faults by dice, everything healed, the verdict
    memory.py     the oracle: when each version was known to be committed, and what each lane counted
    child.py      one process; reads.py reads, writes.py writes, items.py is the table that both are about
    ordinary.py   the ordinary way
    world.py      servers, links (lossy.py) and processes
    faults.py     the faults, one function each
"""
