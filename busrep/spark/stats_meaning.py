"""What each number of the statistics' page says, and what it does not: (name, text, what of the summary it needs)."""

MEANING = (
    (
        "Row, fact, token",
        "A fact is what one transaction wrote to a stream; it has a token (an ID from the stream's sequence, "
        "which all its writers share) and one or more rows. A row's size is that of its JSON text in bytes.",
        "",
    ),
    (
        "Time of commit",
        "committed_at of the row: on PostgreSQL when the transaction began, on SQLite when the row was "
        "inserted. Rates count rows by it; a window in which nothing was committed has none.",
        "",
    ),
    (
        "Rows/s on average",
        "All rows that have a time, by the time from the first commit to the last, pauses included. The peak "
        "is that of the busiest window.",
        "",
    ),
    (
        "Steps, facts of other writers between",
        "How many tokens between two consecutive facts of a writer belong to facts of other writers of the "
        "stream. It tells how writers interleave. A reader follows each writer by itself, so this is no loss.",
        "",
    ),
    (
        "Steps, tokens without any fact between",
        "IDs that the sequence gave and that have no fact in the range looked at: transactions that rolled "
        "back, IDs that were reserved and given back, rows that were pruned. Whether a fact was lost between "
        "the table and an archive, 'busrep pipeline audit' says.",
        "",
    ),
    (
        "Heard on the bus",
        "From the time of commit to when this job's driver, subscribed like a reader, had the message with "
        "the fact's rows. It holds the rest of the transaction, the commit, the writer's queue, Redis and the "
        "network. Facts that were not heard as rows (dropped from the writer's memory, too large for a "
        "message) are not in it, nor those whose position was not proven in the table in time.",
        "listened",
    ),
    (
        "Handled and saved by readers",
        "From the time of commit to saved_at of the first position at or above the fact's token that a "
        "durable reader saved, both by the database's clock. Readers save about once a second unless they "
        "save in a transaction of their own, and the job looks ten times a second; so it is an upper bound of "
        "how long a reader takes to handle a fact.",
        "listened",
    ),
    (
        "Keys",
        "The first field of each row, or the one of --key. The number of keys is exact. Long ones are shown "
        "without what they have in common, and pointing at one shows all of it.",
        "",
    ),
)
