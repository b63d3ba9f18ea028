"""Known bugs: links/. See tests/mutants.py."""

from __future__ import annotations

from tests.mutant import Edit, Mutant

LINK_LIFE = "links/test_link_life.py::test_"
MUTANTS_GAPS = "asyncio/test_mutants_gaps.py::test_"
SECRETS = "asyncio/test_secrets.py::test_"
SOAK = "proof/test_soak.py::test_"
TCP = "links/test_tcp.py::test_"
TCP_RELAY = "links/test_tcp_relay.py::test_"
TLS_NAMES = "links/test_tls_names.py::test_"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="replicate-before-subscribe-is-confirmed",
        rule="2",
        harm="The answer passes before the subscription stands: nothing is taken in until somebody announces again.",
        edits=(
            Edit(
                "RedisLink._connect_once",
                "                asked = confirmed = 0\n",
                "                asked = confirmed = 0\n                self._on_up()\n",
            ),
            Edit(
                "Link._stands",
                "        self._on_up()\n",
                "",
            ),
        ),
        checks=(MUTANTS_GAPS + "2_replicate_follows_the_confirmation_of_the_subscription",),
    ),
    Mutant(
        name="the-publisher-stays-with-the-old-master",
        rule="2",
        harm="After a failover a writer publishes to the old master for ever, where nobody hears it.",
        edits=(
            Edit(
                "RedisLink.open_publisher",
                "        if self._publisher is not None and not self._publisher_doubted:\n",
                "        if self._publisher is not None:\n",
            ),
        ),
        checks=(SOAK + "connections_that_ended_up_on_two_masters_find_together",),
    ),
    Mutant(
        name="a-url-in-doubt-reaches-redis-py",
        rule="2",
        harm="A raw '/' in a Redis password: the driver's error, and the log of the link, show half of it.",
        edits=(Edit("redis_settings", '    check_url(url, "the Redis URL", FORMS)\n', ""),),
        checks=(SECRETS + "no_entry_shows_a_password[0-redis_asyncio]",),
    ),
    Mutant(
        name="rediss-compares-no-host-names",
        rule="2",
        harm="With redis-py 5 any certificate of the authority will do: another host of it reads the password.",
        edits=(Edit("tls_defaults", '"ssl_check_hostname": unchecked is None}', '"ssl_check_hostname": False}'),),
        checks=(TLS_NAMES + "a_certificate_for_another_name_is_refused",),
    ),
    Mutant(
        name="what-a-tcp-server-says-is-quoted",
        rule="7",
        harm="Another service at the address quotes the line that it cannot read: error and log show the secret.",
        edits=(
            Edit(
                "TcpLink._hide_secret",
                'return said if secret is None else said.replace(secret.encode(), b"***")',
                "return said",
            ),
        ),
        checks=(
            TCP + "what_quotes_the_secret_is_not_quoted[500 unknown: %b]",
            TCP + "what_quotes_the_secret_is_not_quoted[ERROR unknown: %b]",
        ),
    ),
    Mutant(
        name="the-secret-sent-back-is-a-message",
        rule="7",
        harm="A server that sends back what it is told, behind its greeting: the bus logs a bad line with the secret.",
        edits=(Edit("TcpLink._take", '            if b"AUTH" in message:\n', "            if False:\n"),),
        checks=(TCP + "what_quotes_the_secret_is_not_quoted[SERVER shop\\n\\nPING 1\\n\\n%b]",),
    ),
    Mutant(
        name="each-line-is-held-against-each-stream",
        rule="9.20",
        harm="A client says positions of 10,000 streams and a PING, 200 kB: the server does nothing else for a second.",
        edits=(
            Edit(
                "Routes._facts",
                "            elif stream and (suffix := wanted.get((command, stream[0]))) is not None:\n",
                "            elif stream and (suffix := dict(wanted).get((command, stream[0]))) is not None:\n",
            ),
        ),
        checks=(TCP_RELAY + "a_message_of_many_streams_and_a_ping_is_taken_apart_in_one_go",),
    ),
    Mutant(
        name="a-relay-makes-a-list-of-the-lines",
        rule="9.20",
        harm="16 MiB of short lines cost a relay 300 MB.",
        edits=(
            Edit(
                "Relay._heard",
                "        elif _has_line_over(settings.line_bytes, data):\n",
                '        elif max(map(len, data.split(b"\\n"))) > settings.line_bytes:\n',
            ),
            Edit(
                "_has_line_over",
                "    start = 0\n    while len(data)",
                '    return max(map(len, data.split(b"\\n"))) > most\n    start = 0\n    while len(data)',
            ),
        ),
        checks=(TCP_RELAY + "lines_are_measured_without_a_list_of_them",),
    ),
    Mutant(
        name="a-relay-shows-any-number-of-lines",
        rule="9.20",
        harm="One message of short lines costs a relay seconds for each client that names no incarnation.",
        edits=(Edit("Connection.hear", "        elif commands > (most :=", "        elif -commands > (most :="),),
        checks=(TCP_RELAY + "a_message_of_more_lines_than_anybody_takes_is_shown_to_nobody_who_cannot_tell",),
        hangs=True,
    ),
    Mutant(
        name="a-subscriber-is-cancelled-once",
        rule="9.21",
        harm="A driver swallows the cancellation: close() waits for ever, and the process holds on to its name.",
        edits=(
            Edit(
                "Link.close",
                "        await self.tasks.stop(self._settings.shutdown_timeout)\n",
                "        for task in self.tasks:\n            task.cancel()\n        await asyncio.wait(self.tasks)\n",
            ),
        ),
        checks=(LINK_LIFE + "a_subscriber_that_swallows_a_cancellation_does_not_keep_a_bus_open",),
    ),
    Mutant(
        name="a-ping-behind-the-last-words",
        rule="9.21",
        harm="A process that closes on a slow network loses what it has published last, and its goodbye.",
        edits=(Edit("TcpLink._ping", "if not self.tasks.closed and (", "if ("),),
        checks=(TCP + "last_words_arrive[tcp]",),
    ),
    Mutant(
        name="clients-of-a-relay-that-is-cancelled-are-told-nothing",
        rule="2",
        harm="What they said last is lost, and they take it for said.",
        edits=(Edit("Relay.keep_publishing", '                    self._lost("publishing was cancelled")\n', ""),),
        checks=(TCP_RELAY + "clients_of_a_relay_that_is_cancelled_begin_anew",),
    ),
)
