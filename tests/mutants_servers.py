"""Known bugs: secrets and servers. See mutants.py."""

from __future__ import annotations

from .mutant import Edit, Mutant

STRANGERS = "test_http_strangers.py::test_"
FILES = "test_private_files.py::test_"
SECRETS, PASSWORDS = "test_secrets.py::test_", "test_cli_passwords.py::test_"
QUOTED = "test_tcp.py::test_what_quotes_the_secret_is_not_quoted"

MUTANTS: tuple[Mutant, ...] = (
    # --- passwords in URLs
    Mutant(
        name="a-url-in-doubt-reaches-redis-py",
        rule="2",
        harm="A raw '/' in a Redis password: the driver's error, and the log of the link, show half of it.",
        edits=(Edit("redis_settings", '    check_url(url, "the Redis URL", FORMS)\n', ""),),
        checks=(SECRETS + "no_entry_shows_a_password[0-redis_asyncio]",),
    ),
    Mutant(
        name="a-url-in-doubt-is-shown",
        rule="2",
        harm="What cannot be taken apart is quoted in the error: postgres:/... with its password.",
        edits=(Edit("shown_url", '        return _scheme_of(url) + "..."\n', "        return url\n"),),
        checks=(SECRETS + "no_entry_shows_a_password[8-store_asyncio]",),
    ),
    Mutant(
        name="an-at-sign-behind-the-host-is-no-doubt",
        rule="2",
        harm="Numbers before a raw '/' in a password are taken for a port, the rest is shown as a path.",
        edits=(Edit("_URL", "(?P<path>(?:[^\\s\\x00-\\x1f\\x7f%?#@]", "(?P<path>(?:[^\\s\\x00-\\x1f\\x7f%?#]"),),
        checks=(SECRETS + "no_entry_shows_a_password[0-redis_asyncio]",),
    ),
    Mutant(
        name="what-libpq-says-is-quoted",
        rule="2",
        harm="libpq quotes what it could not read, and the chain of errors keeps it for whatever reports errors.",
        edits=(
            Edit(
                "_parameters",
                '    check_url(url, "the PostgreSQL URL", FORM)\n    try:\n'
                "        return dict(psycopg.conninfo.conninfo_to_dict(url))\n",
                "    try:\n        return dict(psycopg.conninfo.conninfo_to_dict(url))\n"
                "    except ZeroDivisionError:\n        pass\n",
            ),
            Edit("open_store", '    check_url(url, "the store URL", FORMS)\n', ""),
        ),
        checks=(SECRETS + "no_entry_shows_a_password[8-store_asyncio]",),
    ),
    Mutant(
        name="rediss-compares-no-host-names",
        rule="2",
        harm="With redis-py 5 any certificate of the authority will do: another host of it reads the password.",
        edits=(Edit("tls_defaults", '"ssl_check_hostname": unchecked is None}', '"ssl_check_hostname": False}'),),
        checks=("test_tls_names.py::test_a_certificate_for_another_name_is_refused",),
    ),
    # --- strangers on the HTTP port
    Mutant(
        name="the-newest-stranger-is-cut",
        rule="8",
        harm="200 silent connections keep every new reader out for ten seconds, and for ever if they come again.",
        edits=(
            Edit(
                "_Places.add_stranger", "        return next(iter(self._strangers)) if", "        return connection if"
            ),
        ),
        checks=(STRANGERS + "a_reader_gets_its_page_beside_silent_connections[205]",),
    ),
    Mutant(
        name="readers-are-strangers-between-requests",
        rule="8",
        harm="Silent connections push out readers that are being served.",
        edits=(Edit("_BoundedProtocol.on_response_complete", "        if self._refused and not", "        if not"),),
        checks=(STRANGERS + "readers_with_an_answer_are_left_alone",),
    ),
    Mutant(
        name="a-closed-connection-keeps-its-place",
        rule="8",
        harm="After 200 connections the server answers nobody but with 'come back later'.",
        edits=(
            Edit(
                "_Places.remove",
                "        self._strangers.pop(connection, None)\n        self._members.discard(connection)\n",
                "        self._strangers.pop(connection, None)\n",
            ),
        ),
        checks=(STRANGERS + "places_are_given_back",),
    ),
    # --- files
    Mutant(
        name="sqlite-makes-its-own-file",
        rule="4",
        harm="Every user of the machine can read the table, and what is in it but not yet in the file: -wal.",
        edits=(Edit("sqlite.files.connect", "            create_file(path)  # SQLite", "            ...  # SQLite"),),
        checks=(FILES + "a_table_in_sqlite[umask-022]", FILES + "a_table_in_sqlite_of_threads[umask-022]"),
    ),
    Mutant(
        name="pyarrow-makes-the-parts-of-an-archive",
        rule="4",
        harm="Every user of the machine can read the rows of the archive, where its folder was there before.",
        edits=(Edit("Root.create", "                create_file(self.path(name))\n", ""),),
        checks=(FILES + "the_files_of_an_archive[umask-022]",),
    ),
    Mutant(
        name="a-file-that-is-replaced-loses-its-mode",
        rule="4",
        harm="A report that a group may read is closed to it with the next one.",
        edits=(Edit("open_successor", "                os.fchmod(handle, mode)\n", "                pass\n"),),
        checks=(FILES + "what_replaces_a_file_has_its_mode[umask-022]", FILES + "reports[umask-022]"),
    ),
    Mutant(
        name="the-folder-of-a-group-is-not-its-own",
        rule="4",
        harm="Services that share a table or an archive lock one another out.",
        edits=(Edit("_rights_of_group", "return mode & 0o070 if mode & stat.S_ISGID else 0", "return 0"),),
        checks=(FILES + "a_folder_of_a_group_gives_the_group_its_rights[umask-022]",),
    ),
    # --- passwords of commands
    Mutant(
        name="serve-takes-no-password-file",
        rule="2",
        harm="The password of Redis has to stand on the command line of a server, where all users see it.",
        edits=(
            Edit(
                "cli.serve.serve",
                '@redis_option(default=None, help="Relay this Redis\'s channel [default: stand alone].")\n',
                '@click.option("--redis", "redis_url", metavar="URL")\n',
            ),
        ),
        checks=(PASSWORDS + "the_password_of_redis_comes_from_a_file_or_the_environment[serve]",),
    ),
    # --- what servers say
    Mutant(
        name="a-state-over-http-names-anything",
        rule="9.20",
        harm="A server lists a writer whose name has a NUL: PostgreSQL refuses its position, which ends the reader.",
        edits=(
            Edit(
                "_known_writer",
                "        if reason := refuse_name(name):",
                '        if reason := None if isinstance(name, str) and name and " " not in name else "is no word":',
            ),
        ),
        checks=("test_http_pages.py::test_a_state_that_cannot_be_is_refused[a name with a NUL]",),
    ),
    Mutant(
        name="a-snapshot-over-http-names-anything",
        rule="9.20",
        harm="A server agrees on positions of writers with names of any length, and they are saved.",
        edits=(Edit("check_agreement", "if refuse_name(writer) or not", 'if " " in writer or not'),),
        checks=("test_http_snapshots.py::test_agreements_that_are_not_believed[a name that no database holds]",),
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
        checks=(QUOTED + "[500 unknown: %b]", QUOTED + "[ERROR unknown: %b]"),
    ),
    Mutant(
        name="the-secret-sent-back-is-a-message",
        rule="7",
        harm="A server that sends back what it is told, behind its greeting: the bus logs a bad line with the secret.",
        edits=(Edit("TcpLink._take", '            if b"AUTH" in message:\n', "            if False:\n"),),
        checks=(QUOTED + "[SERVER shop\\n\\nPING 1\\n\\n%b]",),
    ),
    Mutant(
        name="each-line-is-held-against-each-stream",
        rule="9.20",
        harm="A client says positions of 10,000 streams and a PING, 200 kB: the server does nothing else for a second.",
        edits=(
            Edit(
                "TcpServer._facts",
                "            elif stream and (suffix := wanted.get((command, stream[0]))) is not None:\n",
                "            elif stream and (suffix := dict(wanted).get((command, stream[0]))) is not None:\n",
            ),
        ),
        checks=("test_tcp_relay.py::test_a_message_of_many_streams_and_a_ping_is_taken_apart_in_one_go",),
    ),
    Mutant(
        name="a-reason-with-another-number-is-another-reason",
        rule="1",
        harm="Whoever may publish fills the disks of all processes with log lines, one for each line that he says.",
        edits=(Edit("Bus._log_error", "_NUMBER.sub('', error.reason)", "error.reason"),),
        checks=("test_bus.py::test_a_flood_of_bad_lines_fills_no_log",),
    ),
    # --- what may be asked
    Mutant(
        name="presence-is-told-as-often-as-asked",
        rule="2",
        harm="Five REPLICATEs a second: a process with 4,000 users says 2,700 lines a second, to all others.",
        edits=(
            Edit("Presence._keep_telling", "pause = min(told / TOLD_AGAIN, self._refresh / 2)", "pause = 0 * told"),
        ),
        checks=("test_presence.py::test_a_flood_of_questions_costs_so_many_lines_a_second",),
    ),
    Mutant(
        name="what-was-said-is-waited-for-above-the-sequence",
        rule="9.17",
        harm="One forged line behind a gap: the rows of a live writer come by pages for ever, and late.",
        edits=(Edit("SilentWriters.look", "        await self._check_targets()\n", ""),),
        checks=("test_rules.py::test_what_a_forged_line_said_above_the_sequence_is_not_waited_for",),
    ),
    Mutant(
        name="a-foreign-writer-is-not-waited-for",
        rule="9.17",
        harm="Rows of a foreign writer that were inserted past the sequence are stepped over by its next one.",
        edits=(
            Edit(
                "Reader.receive_page",
                "if progress.stream.durable and progress.native:\n                self.unproven",
                "if progress.stream.durable:\n                self.unproven",
            ),
        ),
        checks=("test_core_trust.py::test_9_17_a_foreign_writer_is_waited_for",),
    ),
    Mutant(
        name="a-line-behind-the-sequence-that-was-read-is-not-waited-for",
        rule="9.17",
        harm="What a line said while the sequence was read is given up until the next beat.",
        edits=(Edit("Reader.nothing_above", "progress.target != asked or asked <= highest:", "asked <= highest:"),),
        checks=("test_core_trust.py::test_9_17_what_lies_above_the_sequence_is_not_waited_for",),
    ),
)
