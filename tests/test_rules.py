"""Which tests guard which rule of protocol.md, section 9, and the rules that only show where parts are wired together.

`RULES` is the table: rule -> tests that fail when the rule is left out. Each was seen to fail on a mutant of the code.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import attrs
import psycopg
import pytest
import redis.asyncio

from busrep import Batch, Settings, Stream
from busrep.asyncio import Bus
from busrep.asyncio.writing import Fact, Writing
from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.core.commands import Name
from busrep.core.delivery import RawBatch
from busrep.core.framing import parse_frame
from busrep.core.received import Followed
from busrep.core.states import State
from busrep.errors import (
    ClaimBlocked,
    CommitUnknown,
    ConfigError,
    EpochChanged,
    PositionTooOld,
    ReaderMoved,
    SequenceWentBack,
    Unavailable,
    WaitTimeout,
    WriterFenced,
)
from busrep.runtime.config import WriterConfig
from busrep.stores import facts, fencing, memory, open_store
from busrep.stores.memory import MemoryStore, MemoryTransaction
from busrep.stores.plans import Answers, Sql, Step, complete, run_sync
from busrep.streams import Registry
from busrep.testing import virtual
from busrep.testing.links import FaultyLink
from busrep.testing.pair import QUICK as MEMORY
from busrep.testing.pair import MemoryDeployment
from tests.support.reader import Reader

from . import names
from .asyncio.test_bus import (
    QUICK,
    Deployment,
    Gate,
    Order,
    Seen,
    deployment,
    on_postgres,
    orders,
    payments,
    run,
    typing,
    until,
    write,
)

__all__ = ["deployment", "on_postgres"]  # fixtures

ROOT = Path(__file__).parent.parent

# A name without parameters stands for all its cases. After the rules: sentences of their closing paragraph.
W = "core/test_writer.py::test_rules"
APPENDING = "asyncio/test_appending.py::test_"
BEATS = "core/test_beats.py::test_9_27_"
UNNUMBERED = "asyncio/test_unnumbered.py::test_9_28_"
STRAY = "asyncio/test_stray_lines.py::test_what_a_stranger_says_harms_nobody"
RULES: dict[str, list[str]] = {
    "9.1": [
        "stores/test_stores.py::TestMemory::test_9_1_outcome_open_committed_and_rolled_back",
        "stores/test_stores.py::TestSqlite::test_9_1_outcome_open_committed_and_rolled_back",
        "stores/test_stores.py::TestPostgres::test_9_1_outcome_open_committed_and_rolled_back",
        "stores/test_stores.py::TestSqlite::test_9_1_a_cancelled_commit_is_unknown_until_the_table_decides",
        "stores/test_stores.py::TestPostgres::test_9_1_a_cancelled_commit_is_unknown_until_the_table_decides",
        "stores/test_stores.py::TestPostgres::test_9_1_no_answer_to_commit",
        "stores/test_stores.py::TestPostgres::test_9_1_a_marker_from_the_future_is_a_transaction_that_a_crash_undid",
        "asyncio/test_bus.py::test_a_joined_transaction_is_seen_to_commit_without_being_told",
        "test_rules.py::test_9_1_no_answer_to_commit_keeps_the_fact_open_until_the_table_decides",
        "test_rules.py::test_9_1_a_commit_that_certainly_failed_completes_its_fact",
        "test_rules.py::test_9_1_a_cancelled_caller_does_not_tear_the_commit",
        "test_rules.py::test_9_1_a_joined_transaction_may_commit_though_the_fact_s_block_failed",
        "test_rules.py::test_9_1_the_rows_are_read_after_the_transaction_was_seen_to_have_ended",
    ],
    "9.2": [
        "core/test_ids.py::test_following_goes_to_what_was_noted_before_the_claim_was_read[rule 9.2]",
        "core/test_ids.py::test_following_never_passes_the_open_floor[rule 9.2]",
        "core/test_ids.py::test_writer_fenced_completes_nothing_and_ends_everything[rule 9.2]",
        "core/test_ids.py::test_an_abandoned_id_holds_nothing_up_and_moves_nothing[rule 9.2]",
        "test_rules.py::test_9_2_a_fact_that_never_began_does_not_step_over_a_successor_s",
        "test_rules.py::test_9_2_the_id_of_a_fact_that_never_began_holds_nothing_up",
        "sync/test_writing.py::test_9_2_a_fact_that_never_began_does_not_step_over_a_successor_s",
        f"{W}[rule 9.2 nothing is published once fenced]",
        f"{W}[rule 9.2 not past what the ID generator proved]",
        "stores/test_stores.py::TestMemory::test_9_2_and_9_4_a_fenced_writer_is_told_everywhere",
        "stores/test_stores.py::TestSqlite::test_9_2_and_9_4_a_fenced_writer_is_told_everywhere",
        "stores/test_stores.py::TestPostgres::test_9_2_and_9_4_a_fenced_writer_is_told_everywhere",
        "test_rules.py::test_9_2_what_is_heard_during_a_beat_counts_in_the_next",
        "test_rules.py::test_9_2_a_beat_that_finds_the_claim_gone_ends_all_publishing",
        "test_rules.py::test_9_2_a_fact_that_finds_the_claim_gone_ends_all_publishing",
        "asyncio/test_mutants_gaps.py::test_9_2_a_fenced_writer_that_reads_does_not_hand_out_its_own_facts",
    ],
    "9.3": [
        "core/test_ids.py::test_start",
        "core/test_ids.py::test_rows_prove_no_position_of_another_writer[rule 9.3]",
        "stores/test_stores.py::TestMemory::test_9_3_rows_prove_a_position_only_for_the_own_name",
        "stores/test_stores.py::TestSqlite::test_9_3_rows_prove_a_position_only_for_the_own_name",
        "stores/test_stores.py::TestPostgres::test_9_3_rows_prove_a_position_only_for_the_own_name",
        "stores/test_stores.py::TestSqlite::test_9_3_ids_without_rows_are_kept_in_the_positions_table",
        "test_rules.py::test_9_3_a_beat_stores_nothing_above_an_open_fact",
        "test_rules.py::test_9_3_the_own_position_at_start_is_what_the_claim_proved",
    ],
    "9.4": [
        "stores/test_stores.py::TestMemory::test_9_4_a_claim_waits_for_the_predecessors_transaction_and_starts_behind_it",
        "stores/test_stores.py::TestSqlite::test_9_4_a_claim_waits_for_the_predecessors_transaction_and_starts_behind_it",
        "stores/test_stores.py::TestPostgres::test_9_4_a_claim_waits_for_the_predecessors_transaction_and_starts_behind_it",
        "stores/test_stores.py::TestPostgres::test_9_4_a_claim_that_waits_too_long_names_the_blocker",
        "stores/test_stores.py::TestPostgres::test_9_4_the_blocker_is_named",
        "stores/test_stores.py::TestPostgres::test_9_4_a_serialization_failure_of_the_lock_is_a_fence",
        "stores/test_stores.py::TestPostgres::test_9_4_facts_may_nest_while_a_successor_waits",
        "stores/test_stores.py::TestPostgres::test_racing_claims_have_incarnations_of_their_own",
        "asyncio/test_bus.py::test_a_name_claimed_anew_fences_its_former_holder",
    ],
    "9.5": [
        "stores/test_stores.py::TestMemory::test_9_5_finish_fences_then_takes_the_sequence_as_the_final_position",
        "stores/test_stores.py::TestSqlite::test_9_5_finish_fences_then_takes_the_sequence_as_the_final_position",
        "stores/test_stores.py::TestPostgres::test_9_5_finish_fences_then_takes_the_sequence_as_the_final_position",
        "test_rules.py::test_9_5_rows_and_sequence_are_read_after_the_fence_was_granted",
        "test_rules.py::test_9_5_nobody_claims_the_name_while_its_final_positions_are_taken",
        "stores/test_stores.py::TestSqlite::test_9_5_rows_above_the_sequence_count_in_the_final_position",
        "stores/test_stores.py::TestPostgres::test_9_5_rows_above_the_sequence_count_in_the_final_position",
        "asyncio/test_bus.py::test_a_silent_writer_is_finished_from_the_table",
        "asyncio/test_bus.py::test_a_writer_cut_off_from_redis_alone_is_followed_not_fenced",
    ],
    "9.6": [
        f"{W}[rule 9.6 the head is where the previous frame ended]",
        f"{W}[rule 9.6 after a restart: start start]",
        f"{W}[rule 9.6 a stream that comes late is announced: start start]",
        f"{W}[rule 9.6 after an unknown outcome: the same frames again, byte for byte, before anything new]",
        f"{W}[rule 9.6 new new over dropped rows, late ones too, until the position is past them all]",
        f"{W}[rule 9.6 prev new only over no own row: a drop between composed frames]",
        f"{W}[rule 9.6 each stream has its own head in a shared frame]",
        f"{W}[rule 9.6 a heartbeat is x x, never ahead of the rows that wait]",
        "core/test_writer.py::test_random_every_fact_once_in_order_and_no_false_chain",
        "core/test_reader.py::test_case[R4]",
        "test_rules.py::test_9_6_after_a_publish_of_unknown_outcome_the_same_frame_goes_out_again",
        "test_rules.py::test_9_6_facts_are_handed_over_before_the_position_moves_past_them",
        "test_rules.py::test_9_6_frames_leave_in_the_order_in_which_they_were_composed",
        "test_rules.py::test_a_writer_announces_itself_when_only_its_publishing_connection_was_lost",
    ],
    "9.7": [
        "core/test_ids.py::test_start_g16_refuses_an_own_name_that_is_not_registered",
        "stores/test_stores.py::TestMemory::test_9_7_a_claim_registers_before_the_first_reservation",
        "stores/test_stores.py::TestSqlite::test_9_7_a_claim_registers_before_the_first_reservation",
        "stores/test_stores.py::TestPostgres::test_9_7_a_claim_registers_before_the_first_reservation",
        "stores/test_stores.py::TestSqlite::test_9_7_a_silent_writer_counts_until_it_is_finished",
        "stores/test_stores.py::TestPostgres::test_9_7_a_silent_writer_counts_until_it_is_finished",
        "test_rules.py::test_9_2_what_is_heard_during_a_beat_counts_in_the_next",
        "test_rules.py::test_9_7_a_writer_counts_from_its_registration_though_nobody_has_heard_it",
        "test_rules.py::test_9_7_a_writer_that_left_counts_until_its_last_rows_were_handled",
        "test_rules.py::test_9_7_a_linear_position_is_of_positions_known_before_the_registry_was_read",
    ],
    "9.8": [
        "core/test_ids.py::test_case[G8]",
        "core/test_ids.py::test_the_highest_id_comes_from_reservations_rows_and_announcements_never_from_the_sequence",
        "stores/test_stores.py::TestSqlite::test_G12_a_jumped_sequence_proves_nothing",
        "stores/test_stores.py::TestPostgres::test_G12_a_jumped_sequence_proves_nothing",
        "test_rules.py::test_9_8_a_writer_hears_the_rows_of_the_others",
    ],
    "9.9": [
        "core/test_reader.py::test_rule_9_9_a_page_counts_for_what_it_proves_not_for_what_was_asked",
        "stores/test_stores.py::TestSqlite::test_9_9_a_replica_proves_only_what_its_positions_row_says",
        "stores/test_stores.py::TestPostgres::test_9_9_a_replica_proves_only_what_its_positions_row_says",
        "test_rules.py::test_9_9_a_page_is_of_one_snapshot",
    ],
    "9.10": [
        "stores/test_stores.py::TestMemory::test_9_10_pages_end_on_fact_boundaries_and_hold_a_whole_fact",
        "stores/test_stores.py::TestSqlite::test_9_10_pages_end_on_fact_boundaries_and_hold_a_whole_fact",
        "stores/test_stores.py::TestPostgres::test_9_10_pages_end_on_fact_boundaries_and_hold_a_whole_fact",
        f"{W}[rule 9.10 a fact is never split]",
        f"{W}[rule 9.10 a fact over the frame bound is POSITION id id]",
        "core/test_reader.py::test_large_batches_are_cut_at_fact_boundaries_and_small_ones_joined",
    ],
    "9.11": [
        f"{W}[rule 9.11, 9.16 every frame opens with NAME, of resettable streams and of the others]",
        "core/test_reader.py::test_rule_9_11_a_lower_incarnation_is_ignored",
        "core/test_reader.py::test_rule_9_11_a_higher_incarnation_is_always_a_reset_in_any_direction",
        "core/test_reader.py::test_rule_9_11_a_page_of_another_incarnation_is_not_taken",
        "core/test_reader.py::test_case[R14]",
        "core/test_reader.py::test_case[R14-WITH-A-SOURCE]",
        "asyncio/test_bus.py::test_an_in_memory_stream_is_reset_when_its_writer_restarts",
        "test_rules.py::test_9_11_frames_of_the_own_name_by_another_incarnation_are_no_echoes",
        "test_rules.py::test_9_11_a_step_back_without_name_of_a_writer_that_has_one_is_no_reset",
        "test_rules.py::test_9_11_a_lower_incarnation_of_the_own_name_stops_nobody",
        "stores/test_stores.py::TestMemory::test_9_11_an_incarnation_is_the_clock_or_above_its_predecessor_s",
        "stores/test_stores.py::TestSqlite::test_9_11_an_incarnation_is_the_clock_or_above_its_predecessor_s",
        "stores/test_stores.py::TestPostgres::test_9_11_an_incarnation_is_the_clock_or_above_its_predecessor_s",
        "test_rules.py::test_9_11_a_name_that_gets_its_first_stream_with_a_table_is_heard_in_all_of_them",
        "test_rules.py::test_9_11_rows_of_a_former_life_that_nobody_can_handle_do_not_stop_the_new_one",
        "core/test_reader.py::test_a_reset_that_nobody_was_told_of_outlives_what_empties_the_queue",
        "core/test_reader.py::test_a_reset_that_came_while_its_stream_was_stopped_is_told_of_when_it_goes_on",
        "test_rules.py::test_9_16_a_handler_at_work_in_the_log_before_is_told_of_the_reset",
        "test_rules.py::test_9_16_a_reset_while_nobody_follows_is_told_of_before_the_next_rows",
    ],
    "9.12": [
        "stores/test_stores.py::TestMemory::test_9_12_a_save_hits_the_row_it_left_or_none",
        "stores/test_stores.py::TestSqlite::test_9_12_a_save_hits_the_row_it_left_or_none",
        "stores/test_stores.py::TestPostgres::test_9_12_a_save_hits_the_row_it_left_or_none",
        "test_rules.py::test_9_12_the_row_to_save_to_is_inserted_at_registration",
        "test_rules.py::test_9_12_where_a_reader_from_now_on_begins_is_saved_at_registration",
        "stores/test_stores.py::TestSqlite::test_9_12_nobody_registers_in_the_log_before_a_restore",
        "stores/test_stores.py::TestPostgres::test_9_12_nobody_registers_in_the_log_before_a_restore",
        "stores/test_stores.py::TestPostgres::test_9_12_a_restore_waits_for_who_registers",
        "stores/test_stores.py::TestPostgres::test_9_12_who_registers_waits_for_a_restore",
        "test_rules.py::test_9_12_a_timed_save_that_finds_another_position_reloads_and_never_goes_back",
        "test_rules.py::test_9_12_positions_of_the_old_log_are_not_saved_over_those_of_the_new",
        "test_rules.py::test_9_12_a_handler_s_save_never_takes_back_what_another_process_saved",
        "test_rules.py::test_9_12_what_another_process_handled_in_the_new_log_is_not_handled_again",
        "stores/test_stores.py::TestMemory::test_9_12_of_two_that_begin_anew_the_second_keeps_what_the_first_saved",
        "stores/test_stores.py::TestSqlite::test_9_12_of_two_that_begin_anew_the_second_keeps_what_the_first_saved",
        "stores/test_stores.py::TestPostgres::test_9_12_of_two_that_begin_anew_the_second_keeps_what_the_first_saved",
        "stores/test_stores.py::TestPostgres::test_9_12_a_save_under_repeatable_read_loses_to_an_earlier_one",
        "asyncio/test_bus.py::test_exactly_once_saves_in_the_handler_s_transaction",
        "asyncio/test_bus.py::test_two_processes_under_one_reader_name_are_found_out",
        "asyncio/test_bus.py::test_a_writer_that_joins_later_is_saved_exactly_once_on_sqlite",
        "asyncio/test_mutants_gaps.py::test_9_12_a_batch_given_up_while_it_is_registered_is_not_handed_to_the_next_loop",
        "asyncio/test_mutants_gaps.py::test_9_12_a_batch_given_up_between_two_tries_is_not_tried_again",
        "asyncio/test_mutants_gaps.py::test_9_12_rows_that_a_twin_has_handled_and_that_were_pruned_stop_nobody",
        "test_rules.py::test_9_12_where_rows_of_the_log_before_ended_is_no_position_in_the_new_one",
    ],
    "9.13": [
        "core/test_reader.py::test_rule_9_13_lines_are_held_in_order_while_catching_up_and_follow_the_same_rules",
        "core/test_reader.py::test_rule_9_13_on_overflow_the_newest_are_dropped_and_it_stays_unconnected",
        "core/test_reader.py::test_rule_9_13_overflow_survives_a_second_gap_among_the_held_lines",
        "test_rules.py::test_9_13_after_an_overflow_all_lines_are_dropped_also_small_ones",
        "core/test_reader.py::test_rule_9_13_while_a_snapshot_loads_all_lines_are_held_and_follow_it_in_order",
        "core/test_reader.py::test_rows_behind_an_old_line_of_a_foreign_writer_are_not_taken_for_all_there_are",
    ],
    "9.14": [
        "core/test_reader.py::test_rule_9_14_a_position_clears_a_held_batch",
        "core/test_reader.py::test_rule_9_14_a_disconnect_clears_a_held_batch",
        "test_rules.py::test_9_14_what_follows_a_lost_link_is_not_trusted_before_a_position",
    ],
    "9.15": [
        "core/test_ids.py::test_an_id_that_is_not_new_is_never_used",
        "core/test_ids.py::test_an_id_finished_here_since_is_never_used_again[rule 9.15]",
        "core/test_ids.py::test_ids_reserved_ahead_are_open_until_used_or_given_up[rule 9.15]",
        "stores/test_stores.py::TestPostgres::test_9_15_the_sequence_is_verified",
        "stores/test_stores.py::TestSqlite::test_9_15_a_sequence_behind_the_table_is_repaired",
        "stores/test_stores.py::TestPostgres::test_9_15_a_sequence_behind_the_table_is_repaired",
        "test_rules.py::test_9_15_a_sequence_that_went_back_is_refused_while_running",
    ],
    "a lower POSITION is ignored and counted": [
        "core/test_reader.py::test_sequences_below_a_held_position_are_ignored_and_counted",
    ],
    "the announced epoch is a hint, pages decide": [
        "core/test_reader.py::test_the_announced_epoch_is_a_hint_and_a_page_decides",
        "core/test_reader.py::test_a_page_of_another_epoch_is_not_delivered",
    ],
    "9.16": [
        f"{W}[rule 9.11, 9.16 every frame opens with NAME, of resettable streams and of the others]",
        "core/test_senders.py::test_a_writer_is_believed_once_it_announced_the_listener_s_log",
        "core/test_senders.py::test_a_higher_incarnation_has_to_announce_its_log_itself",
        "core/test_senders.py::test_lines_of_a_native_writer_count_in_its_own_messages_alone",
        "core/test_senders.py::test_a_lower_incarnation_counts_when_it_alone_announced_the_listener_s_log",
        "core/test_senders.py::test_a_sign_of_life_is_what_is_believed_or_of_a_writer_without_a_log",
        "core/test_reader.py::test_rule_9_16_what_is_not_believed_is_no_sign_of_life",
        "asyncio/test_trust.py::test_9_16_lines_of_a_native_writer_without_its_name_count_for_nothing",
        "asyncio/test_trust.py::test_9_16_also_of_a_stream_without_a_table_once_it_was_heard_natively",
        "asyncio/test_trust.py::test_9_16_lines_of_another_deployment_are_ignored_also_of_a_stream_without_a_table",
        "test_rules.py::test_9_16_a_writer_of_a_table_made_anew_is_heard_whatever_it_is_called",
        "core/test_reader.py::test_rule_9_16_what_a_writer_of_another_log_says_is_not_taken_for_positions_in_this_one",
        "core/test_reader.py::test_rule_9_16_a_native_writer_counts_from_its_first_announcement",
        "core/test_reader.py::test_rule_9_16_after_an_epoch_change_writers_of_the_new_log_count_and_those_of_the_old_do_not",
        "test_rules.py::test_9_16_a_writer_learns_nothing_from_one_of_another_log",
        "test_rules.py::test_9_16_a_writer_from_before_a_restore_proves_nothing_to_readers_of_the_new_log",
        "asyncio/test_mutants_gaps.py::test_9_16_own_positions_of_the_log_before_are_not_saved_in_the_new_one",
    ],
    "9.20": [
        "core/test_hostile_messages.py::test_items_are_bounded",
        "core/test_hostile_messages.py::test_rows_are_bounded",
        "core/test_hostile_messages.py::test_a_long_command_counts_for_more",
        "core/test_hostile_messages.py::test_many_streams_are_announced_in_messages_that_pass",
        "core/test_hostile_messages.py::test_facts_between_facts_too_large_make_frames_that_pass",
        "core/test_hostile_messages.py::test_what_a_cut_message_held_of_a_foreign_writer_is_not_stepped_over",
        "core/test_names.py::test_a_line_with_a_bad_name_is_malformed",
        "core/test_names.py::test_a_command_with_a_bad_name_cannot_be_made",
        "stores/test_saving_refused.py::test_one_position_that_cannot_be_saved_holds_up_no_other",
    ],
    "9.21": [
        "links/test_link_life.py::test_a_stray_name_makes_nobody_reconnect",
        "links/test_link_life.py::test_a_name_in_no_table_is_forgotten_when_it_is_silent",
        "links/test_link_life.py::test_a_writer_that_closes_costs_no_link",
        "links/test_link_life.py::test_a_writer_announces_its_final_position_last",
        "links/test_link_life.py::test_a_lost_last_message_of_a_writer_that_closed_is_noticed",
        "asyncio/test_goodbye.py::test_nobody_warns_of_a_closed_writer_of_invalidations_in_memory",
        "asyncio/test_goodbye.py::test_nobody_warns_of_a_writer_that_closed",
        "asyncio/test_goodbye.py::test_the_final_position_is_behind_what_others_were_given",
        "asyncio/test_goodbye.py::test_the_table_tells_a_reader_that_did_not_hear_the_goodbye",
        "asyncio/test_goodbye.py::test_a_name_comes_back_after_its_goodbye",
        "asyncio/test_goodbye.py::test_a_writer_that_crashed_is_warned_of",
        "asyncio/test_goodbye.py::test_a_writer_with_a_fact_in_doubt_is_not_finished_by_itself",
        "asyncio/test_goodbye.py::test_a_fact_in_doubt_that_is_settled_while_the_writer_closes_is_finished_with_it",
        "links/test_link_life.py::test_an_idle_reader_finds_out_that_its_subscription_is_gone",
        "test_rules.py::test_hearing_nothing_for_five_beats_forces_a_reconnect",
    ],
    "9.22": [
        "stores/test_late_commits.py::test_9_22_a_late_commit_waits_for_its_standby",
        "stores/test_durability.py::test_no_fact_is_announced_that_a_crash_takes_back",
        "stores/test_durability.py::test_a_fact_s_transaction_is_durable",
        "stores/test_durability.py::test_a_reload_of_the_configuration_inside_a_fact_leaves_it_durable",
        "stores/test_durability.py::test_an_id_that_no_row_holds_is_on_disk_when_it_is_given",
        "stores/test_durable_positions.py::test_what_a_reader_began_outlives_a_crash",
        "stores/test_durability.py::test_a_caller_s_sqlite_connection_is_made_durable",
        "stores/test_durability.py::test_a_caller_s_transaction_on_sqlite_that_may_be_lost_is_refused",
    ],
    "9.23": [
        "stores/test_failover.py::test_a_failover_that_loses_commits_skips_no_row",
        "stores/test_failover.py::test_a_planned_switchover_needs_nobody",
        "stores/test_failover.py::test_another_timeline_fences_all_writers_until_they_claim_again",
    ],
    "9.24": [
        "asyncio/test_clock_behind.py::test_lower_incarnations_alone_for_five_beats_are_a_reset",
        "asyncio/test_clock_behind.py::test_a_reader_is_not_deaf_to_a_writer_whose_clock_is_behind",
        "asyncio/test_clock_behind.py::test_a_writer_goes_on_above_a_predecessor_that_it_hears",
    ],
    "9.17": [
        "stores/test_stores.py::TestMemory::test_9_17_no_position_above_the_sequence_is_stored",
        "stores/test_stores.py::TestSqlite::test_9_17_no_position_above_the_sequence_is_stored",
        "stores/test_stores.py::TestPostgres::test_9_17_no_position_above_the_sequence_is_stored",
        "stores/test_stores.py::TestMemory::test_9_17_a_page_proves_no_more_than_the_sequence",
        "stores/test_stores.py::TestSqlite::test_9_17_a_page_proves_no_more_than_the_sequence",
        "stores/test_stores.py::TestPostgres::test_9_17_a_page_proves_no_more_than_the_sequence",
        "stores/test_stores.py::TestMemory::test_9_17_no_reader_s_position_above_the_sequence_is_saved",
        "stores/test_stores.py::TestSqlite::test_9_17_no_reader_s_position_above_the_sequence_is_saved",
        "stores/test_stores.py::TestPostgres::test_9_17_no_reader_s_position_above_the_sequence_is_saved",
        "asyncio/test_trust.py::test_9_17_a_reader_that_is_above_the_sequence_goes_back_to_what_is_saved",
        "asyncio/test_trust.py::test_9_17_a_poisoned_saved_position_stops_the_reader_with_what_to_run",
        "stores/test_stores.py::TestMemory::test_9_17_a_final_position_is_not_above_the_sequence",
        "stores/test_stores.py::TestSqlite::test_9_17_a_final_position_is_not_above_the_sequence",
        "stores/test_stores.py::TestPostgres::test_9_17_a_final_position_is_not_above_the_sequence",
    ],
    "9.18": [
        "asyncio/test_trust.py::test_9_18_an_unregistered_writer_moves_nothing",
        "asyncio/test_trust.py::test_9_18_the_registry_is_doubted_for_who_names_itself_in_this_log",
        "asyncio/test_trust.py::test_9_18_a_writer_that_joins_is_followed_once_the_registry_lists_it",
        "asyncio/test_trust.py::test_9_18_a_declared_foreign_writer_is_believed",
        "asyncio/test_trust.py::test_9_18_a_writer_follows_registered_writers_alone",
        f"{STRAY}[sqlite-redis-asyncio-a writer that does not exist]",
    ],
    "9.19": [
        "asyncio/test_trust.py::test_9_19_of_a_registered_writer_the_incarnation_of_its_claim_alone_counts",
        "asyncio/test_trust.py::test_9_19_a_higher_incarnation_on_the_wire_fences_nobody",
        f"{STRAY}[sqlite-redis-asyncio-another incarnation]",
    ],
    "an epoch that was refuted is asked about again": [
        "core/test_reader.py::test_a_refuted_epoch_is_asked_about_again_when_it_is_announced_again",
    ],
    "an epoch that nobody announces is noticed": [
        "test_rules.py::test_a_restore_that_no_writer_lives_to_announce_is_noticed",
    ],
    "restored bumps all incarnations": [
        "stores/test_stores.py::TestMemory::test_restored_changes_the_epoch_and_fences_everybody",
        "stores/test_stores.py::TestSqlite::test_restored_changes_the_epoch_and_fences_everybody",
        "stores/test_stores.py::TestPostgres::test_restored_changes_the_epoch_and_fences_everybody",
        "stores/test_stores.py::TestMemory::test_restored_gives_no_incarnation_out_again",
        "stores/test_stores.py::TestSqlite::test_restored_gives_no_incarnation_out_again",
        "stores/test_stores.py::TestPostgres::test_restored_gives_no_incarnation_out_again",
        "stores/test_stores.py::TestPostgres::test_9_4_a_claim_waits_for_a_restore_that_is_at_work",
    ],
    "saved positions include the epoch": [
        "test_rules.py::test_a_new_log_that_is_set_back_once_more_costs_nobody_what_was_saved_in_that_one",
        "test_rules.py::test_rows_pruned_from_the_log_before_stop_nobody_in_the_new_one",
        "test_rules.py::test_a_position_of_the_log_before_is_not_held_against_the_sequence_of_the_new_one",
        "test_rules.py::test_9_12_positions_of_the_old_log_are_not_saved_over_those_of_the_new",
        "test_rules.py::test_saved_positions_of_another_epoch_are_not_gone_on_from",
        "stores/test_stores.py::TestMemory::test_9_12_a_save_hits_the_row_it_left_or_none",
        "stores/test_stores.py::TestSqlite::test_9_12_a_save_hits_the_row_it_left_or_none",
        "stores/test_stores.py::TestPostgres::test_9_12_a_save_hits_the_row_it_left_or_none",
    ],
    "others are followed on heartbeats only": [
        f"{W}[rule 9 others are followed on heartbeats only: once a beat]",
    ],
    "no linear position without following": [
        "test_rules.py::test_9_7_streams_that_do_not_follow_have_no_linear_position",
    ],
    "delivered positions only": [
        "test_rules.py::test_what_was_received_and_not_handled_is_neither_saved_nor_waited_for",
        "test_rules.py::test_positions_of_a_reader_are_the_delivered_ones",
        "core/test_reader.py::test_what_was_handled_before_a_reset_is_no_position_of_the_new_life",
        "core/test_reader.py::test_a_stopped_one_takes_in_nothing_until_it_is_resumed",
    ],
    "rows of a dead predecessor reach the local handlers": [
        "asyncio/test_bus.py::test_a_reader_that_writes_too_gets_what_its_dead_predecessor_committed",
        "asyncio/test_faults.py::test_a_link_lost_while_a_predecessor_s_rows_are_fetched_does_not_end_that",
        "asyncio/test_mutants_gaps.py::test_9_own_positions_count_once_those_of_the_predecessor_are_known",
    ],
    "hearing the own name with a higher incarnation makes the writer read its claim": [
        "asyncio/test_trust.py::test_9_19_a_name_that_is_claimed_anew_fences_at_once",
        "asyncio/test_trust.py::test_9_19_a_writer_without_a_claim_has_nothing_but_the_wire",
    ],
    "the floor is the highest deleted row, never above the proven position": [
        "stores/test_stores.py::TestMemory::test_pruning_moves_the_floor_and_a_fetch_below_it_is_told",
        "stores/test_stores.py::TestMemory::test_the_floor_is_the_highest_deleted_row",
        "stores/test_stores.py::TestSqlite::test_pruning_moves_the_floor_and_a_fetch_below_it_is_told",
        "stores/test_stores.py::TestSqlite::test_the_floor_is_the_highest_deleted_row",
        "stores/test_stores.py::TestPostgres::test_pruning_moves_the_floor_and_a_fetch_below_it_is_told",
        "stores/test_stores.py::TestPostgres::test_the_floor_is_the_highest_deleted_row",
    ],
    "hearing nothing for five beats forces a reconnect": [
        "asyncio/test_bus.py::test_a_half_open_link_is_noticed",
        "test_rules.py::test_hearing_nothing_for_five_beats_forces_a_reconnect",
    ],
    "a REPLICATE after an answer was composed gets another": [
        f"{W}[rule 9 a REPLICATE after an answer was composed gets another]",
        "test_rules.py::test_a_replicate_is_answered_at_once",
        "core/test_replicate_rate.py::test_the_ones_that_come_too_soon_get_one_answer_together_later",
        "core/test_replicate_rate.py::test_a_flood_costs_four_announcements_in_a_second",
    ],
    "9.25": [
        *(
            f"http/test_reference.py::test_an_answer_of_the_reference_system_is_taken[{answer}]"
            for answer in (
                "beyond_the_asked_token",
                "cut_within_its_last_fact",
                "limited_above_its_last_row",
                "one_fact_of_120_rows",
            )
        ),
        "http/test_reference.py::test_an_answer_that_leads_nowhere_is_refused[refused_not_forward]",
        "http/test_reference.py::test_each_writer_is_asked_at_its_own_address",
        "http/test_reference.py::test_a_reader_over_http_alone_ends_where_a_reader_of_the_channel_does",
        "http/test_reference.py::test_a_reader_begins_where_it_is_told_to[now]",
        "http/test_reference.py::test_a_reader_begins_where_it_is_told_to[a map]",
    ],
    "9.26": [
        *(
            f"{APPENDING}9_26_of_what_got_no_answer_the_table_decides[{where}-{landed}]"
            for where in ("deployment", "on_postgres")
            for landed in ("written", "not written")
        ),
        f"{APPENDING}9_26_a_series_that_another_question_has_ended_is_no_loss[on_postgres]",
        f"{APPENDING}9_26_a_fact_begins_under_a_name_that_is_its_writer_s[on_postgres]",
        f"{APPENDING}9_26_a_fact_whose_writer_was_finished_meanwhile_is_refused[on_postgres-write]",
        f"{APPENDING}9_26_a_fact_whose_name_another_process_won_is_fenced[on_postgres-write]",
        f"{APPENDING}a_fact_that_the_table_refuses_fails_alone",
        "stores/test_stores.py::TestSqlite::test_9_26_rows_are_appended_while_the_claim_stands",
        "stores/test_stores.py::TestPostgres::test_9_26_rows_are_appended_while_the_claim_stands",
    ],
    "9.27": [
        f"{BEATS}a_beat_announces_streams_in_which_nothing_happened_in_turns",
        f"{BEATS}a_stream_that_moved_is_announced_at_the_next_beat",
        f"{BEATS}rows_that_were_dropped_are_announced_at_the_next_beat",
        f"{BEATS}all_streams_are_announced_to_whoever_asks_after_a_reconnect_and_at_the_end",
        f"{BEATS}streams_in_memory_are_announced_at_every_beat",
        f"{BEATS}every_channel_carries_a_sign_of_life",
        f"{BEATS}a_writer_of_single_lines_announces_all",
        f"{BEATS}the_turns_of_a_beat_that_redis_held_up_are_not_lost",
        f"{BEATS}a_reader_asks_until_every_stream_of_a_writer_that_it_hears_is_known",
        f"{BEATS}of_lines_that_were_dropped_for_a_bound_the_positions_are_asked_for",
        f"{BEATS}who_will_not_tell_is_not_asked",
        "runtime/test_beat.py::test_9_27_a_beat_with_nothing_to_tell_stores_one_position_for_the_sign_of_life",
        "runtime/test_beat.py::test_9_27_what_has_moved_is_stored_until_a_beat_succeeds",
        f"{BEATS}writers_beat_together_by_a_clock_that_all_see",
        f"{BEATS}writers_of_a_large_deployment_beat_in_groups",
        "runtime/test_beat.py::test_9_27_a_writer_joins_those_whom_the_registry_lists_by_the_server_s_clock",
        "runtime/test_beat.py::test_9_27_a_line_that_the_registry_does_not_explain_has_it_read_at_the_next_beat",
    ],
    "9.28": [
        f"{UNNUMBERED}no_request_asks_for_ids[on_postgres]",
        f"{UNNUMBERED}facts_that_are_published_at_the_same_time_share_a_request[on_postgres]",
        *(
            f"{UNNUMBERED}of_ids_whose_answer_was_lost_the_table_tells[{where}-{landed}]"
            for where in ("deployment", "on_postgres")
            for landed in ("written", "not written")
        ),
        f"{UNNUMBERED}beside_a_doubt_ids_are_reserved[on_postgres]",
        f"{UNNUMBERED}nothing_is_asked_while_another_answer_is_on_its_way[on_postgres]",
        f"{UNNUMBERED}of_two_lost_answers_the_first_that_is_asked_after_tells[on_postgres]",
        f"{UNNUMBERED}a_sequence_that_is_behind_gives_no_id[on_postgres]",
        f"{UNNUMBERED}under_a_name_that_was_finished_it_is_written_anew[on_postgres]",
        f"{UNNUMBERED}of_ids_that_cannot_be_told_any_more_the_next_claim_tells[on_postgres]",
        "sync/test_writing.py::test_9_28_ids_of_a_joined_transaction_are_not_taken_for_them",
    ],
}

CASES = [
    *(f"R{number}" for number in range(1, 16)),
    *(f"W{number}" for number in range(1, 9)),
    *(f"G{number}" for number in range(1, 20)),
]


def test_every_rule_names_tests_that_exist() -> None:
    assert [name for tests in RULES.values() for name in tests if not names.exists(name)] == []
    _, _, section = (ROOT / "docs" / "protocol.md").read_text().partition("\n## 9.")
    rules = [f"9.{number}" for number in re.findall(r"^(\d+)\. \*\*", section, re.M)]
    assert len(rules) >= 25
    assert [rule for rule in rules if not RULES.get(rule)] == []
    assert all(RULES.values())


@pytest.mark.parametrize("case", CASES)
def test_every_case_of_the_protocol_is_a_test(case: str) -> None:
    files = {
        "R": ("core/test_reader.py", "asyncio/test_bus.py"),
        "W": ("core/test_writer.py",),
        "G": ("core/test_ids.py", "stores/test_stores.py"),
    }
    named = re.compile(rf"(?<![A-Za-z0-9]){case}(?![0-9])", re.IGNORECASE)
    found = [word for file in files[case[0]] for word in names.words(file) if named.search(word)]
    assert found, f"no test carries the name {case}"


# --- the writing half on a memory store: no Redis, so every moment can be chosen


class Bench:
    """A `Writing` that is connected, and what it would publish."""

    def __init__(self, store: MemoryStore, writing: Writing) -> None:
        self.store, self.writing = store, writing

    async def fact(self, number: int, *, begin: bool = False) -> int:
        """``begin``: a transaction of its own, as a statement in the block would begin it."""
        async with Fact(self.writing, (orders,)) as fact:
            if begin:
                await fact.begin()
            fact.add(Order(number, "new"))
        return fact.id

    def published(self) -> list[str]:
        """Publish all; the RDATA lines and the POSITIONs that go somewhere, shortened."""
        lines: list[str] = []
        while frames := self.writing.core.frames_to_publish():
            for frame in frames:
                if not frame.announcement:
                    lines += frame.data.decode().split("\n")
                self.writing.core.published(frame)
        return [" ".join(line.split(" ")[:4:3]) for line in lines if line.startswith("RDATA orders")]

    async def proven(self, writer: str = "w1") -> int:
        return next(one.position for one in await self.store.known() if one.writer == writer)


@asynccontextmanager
async def bench(*others: str) -> AsyncIterator[Bench]:
    """Writer w1 of a fresh memory store, after ``others`` have registered."""
    registry = Registry([orders])
    store = MemoryStore(secrets.token_hex(6), registry, QUICK)
    await store.init()
    for other in others:
        await store.claim(other, ["orders"], timeout=1)
    claim = await store.claim("w1", ["orders"], timeout=1)
    config = WriterConfig("w1", "bus", registry, QUICK, store)
    writing = Writing(config, claim, claim.incarnation, wake=lambda: None)
    writing.core.connected(0.0)
    made = Bench(store, writing)
    made.published()
    yield made


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "aborted"])
def test_9_1_no_answer_to_commit_keeps_the_fact_open_until_the_table_decides(
    landed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = MemoryTransaction.commit

    async def main() -> None:
        async with bench() as w1:
            assert await w1.fact(1) == 1
            assert w1.published() == ["RDATA 1"]
            under_way: list[MemoryTransaction] = []
            rows: list[Any] = []

            async def lose_the_answer(transaction: MemoryTransaction) -> None:
                under_way.append(transaction)
                rows.extend(transaction._pending)
                raise CommitUnknown(transaction, OSError("connection lost"))

            with monkeypatch.context() as patch:
                patch.setattr(MemoryTransaction, "commit", lose_the_answer)
                with pytest.raises(CommitUnknown):
                    await w1.fact(2, begin=True)
            assert await w1.fact(3) == 3
            await w1.writing.settle()  # its transaction goes on
            assert w1.published() == []
            assert w1.writing.generators["orders"].position == 1
            (transaction,) = under_way
            assert rows, "the store rolled it back although COMMIT was sent"
            transaction._pending = rows if landed else []
            await commit(transaction)
            await w1.writing.settle()
            assert w1.published() == (["RDATA 2", "RDATA 3"] if landed else ["RDATA 3"])
            assert w1.writing.generators["orders"].position == 3

    run(main())


async def cut(_transaction: MemoryTransaction) -> None:
    """The link is cut where a transaction begins."""
    raise Unavailable("the database", OSError("cut"))


async def fail_behind_a_successor(w1: Bench, *, cancel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fact gets its ID when a successor has the name, and a fact below; it fails before it can learn of that."""
    reserve, asked = w1.store.reserve, asyncio.Event()

    async def late(stream: str, count: int, held: Any = None) -> list[int]:
        await w1.store.claim("w1", ["orders"], timeout=1)
        await reserve(stream, 1)  # the successor's
        asked.set()
        return await reserve(stream, count)

    with monkeypatch.context() as patch:
        patch.setattr(w1.store, "reserve", late)
        patch.setattr(MemoryTransaction, "begin", cut)
        task = asyncio.create_task(w1.fact(2, begin=True))
        if cancel:
            await asked.wait()
            task.cancel()
        with pytest.raises((Unavailable, asyncio.CancelledError)):
            await task
        await asyncio.sleep(0)


@pytest.mark.parametrize("cancel", [False, True], ids=["begin fails", "cancelled while it asks"])
def test_9_2_a_fact_that_never_began_does_not_step_over_a_successor_s(
    cancel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with bench() as w1:
            assert await w1.fact(1) == 1
            w1.published()
            await fail_behind_a_successor(w1, cancel=cancel, monkeypatch=monkeypatch)
            ids = w1.writing.generators["orders"]
            assert (ids.open, ids.asked, ids.position) == (0, 0, 1)
            await w1.writing.beat()
            assert w1.writing.fenced is not None
            assert ids.position == 1

    run(main())


@pytest.mark.parametrize("rolled_back", [True, False], ids=["rolled back", "empty"])
def test_9_2_a_fact_that_wrote_nothing_does_not_step_over_a_successor_s(
    rolled_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its block ran no statement: nothing has looked at the claim since its ID was reserved."""

    async def main() -> None:
        async with bench() as w1:
            assert await w1.fact(1) == 1
            reserve = w1.store.reserve

            async def late(stream: str, count: int, held: Any = None) -> list[int]:
                await w1.store.claim("w1", ["orders"], timeout=1)
                await reserve(stream, 1)  # the successor's
                return await reserve(stream, count)

            with monkeypatch.context() as patch, contextlib.suppress(KeyError):
                patch.setattr(w1.store, "reserve", late)
                async with Fact(w1.writing, (orders,)):
                    if rolled_back:
                        raise KeyError
            ids = w1.writing.generators["orders"]
            assert (ids.open, ids.asked, ids.position) == (0, 0, 1)
            await w1.writing.beat()
            assert w1.writing.fenced is not None
            assert ids.position == 1

    run(main())


def test_9_2_the_id_of_a_fact_that_never_began_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with bench() as w1:
            with monkeypatch.context() as patch, pytest.raises(Unavailable):
                patch.setattr(MemoryTransaction, "begin", cut)
                await w1.fact(1, begin=True)
            ids = w1.writing.generators["orders"]
            assert (ids.open, ids.position) == (0, 0)
            await w1.writing.beat()  # the claim stands
            assert ids.position == 1
            with monkeypatch.context() as patch, pytest.raises(Unavailable):
                patch.setattr(MemoryTransaction, "begin", cut)
                await w1.fact(2, begin=True)
            assert await w1.fact(3) == 3
            assert w1.published() == ["RDATA 3"]
            assert ids.position == 3

    run(main())


def test_9_1_a_commit_that_certainly_failed_completes_its_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(transaction: MemoryTransaction) -> None:
        raise ValueError("a deferred constraint")

    async def main() -> None:
        async with bench() as w1:
            with monkeypatch.context() as patch, pytest.raises(ValueError, match="constraint"):
                patch.setattr(MemoryTransaction, "commit", refused)
                await w1.fact(1, begin=True)
            await w1.fact(2, begin=True)
            assert w1.published() == ["RDATA 2"]

    run(main())


def test_9_1_a_cancelled_caller_does_not_tear_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = MemoryTransaction.commit

    async def main() -> None:
        async with bench() as w1:
            sent, go_on = asyncio.Event(), asyncio.Event()

            async def slow(transaction: MemoryTransaction) -> None:
                sent.set()
                await go_on.wait()
                await commit(transaction)

            monkeypatch.setattr(MemoryTransaction, "commit", slow)
            task = asyncio.create_task(w1.fact(1, begin=True))
            await sent.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert w1.writing.generators["orders"].open == 1
            go_on.set()
            await until(lambda: w1.writing.generators["orders"].position == 1)
            assert w1.published() == ["RDATA 1"]

    run(main())


def test_9_3_the_own_position_at_start_is_what_the_claim_proved() -> None:
    async def main() -> None:
        async with bench("w2") as w1:
            await w1.fact(1)
            other = await w1.store.claim("w2", ["orders"], timeout=1)
            assert await w1.store.reserve("orders", 8) == [*range(2, 10)]
            await w1.store.heartbeat(other, {"orders": 9})
            again = await w1.store.claim("w1", ["orders"], timeout=1)
            assert (again.starts, again.highest) == ({"orders": 1}, {"orders": 9})
            config = WriterConfig("w1", "bus", w1.store.streams, QUICK, w1.store)
            writing = Writing(config, again, again.incarnation, wake=lambda: None)
            assert writing.core.positions() == {"orders": 1}
            assert writing.generators["orders"].position == 1
            assert writing.generators["orders"].highest == 9

    run(main())


def while_beating(w1: Bench, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Have something happen between the note and the answer of the store's heartbeat."""
    heartbeat = w1.store.heartbeat

    async def slow(*args: Any, **options: Any) -> Any:
        happens()
        return await heartbeat(*args, **options)

    monkeypatch.setattr(w1.store, "heartbeat", slow)


def name_of_w2(w1: Bench) -> str:
    [(incarnation,)] = w1.store.world.ask("SELECT incarnation FROM busrep_writers WHERE writer = 'w2'")
    return f"NAME w2 {incarnation}"


def hear(w1: Bench, *lines: str) -> None:
    """A message; of w2, in its claim, if it does not say itself whose it is."""
    if not lines[0].startswith(("SERVER ", "NAME ")):
        lines = (f"SERVER bus {w1.writing.epoch}", name_of_w2(w1), *lines)
    w1.writing.others.heard(parse_frame("\n".join(lines).encode(), 10_000))


def test_9_2_what_is_heard_during_a_beat_counts_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with bench("w2") as w1:
            ids = w1.writing.generators["orders"]
            await w1.store.reserve("orders", 9)
            hear(w1, "POSITION orders w2 5 5")
            while_beating(w1, monkeypatch, lambda: hear(w1, "POSITION orders w2 9 9"))
            await w1.writing.beat()
            assert ids.position == 5
            await w1.writing.beat()
            assert ids.position == 9

    run(main())


def test_9_2_a_beat_that_finds_the_claim_gone_ends_all_publishing() -> None:
    async def main() -> None:
        async with bench("w2") as w1:
            await w1.fact(1)
            hear(w1, "POSITION orders w2 5 5")
            await w1.store.claim("w1", ["orders"], timeout=1)
            await w1.writing.beat()
            ids = w1.writing.generators["orders"]
            assert w1.writing.fenced is not None
            assert w1.writing.core.statistics()["fenced"]
            assert w1.published() == []
            assert ids.position == 1  # and does not follow
            with pytest.raises(WriterFenced):
                ids.ask(now=0.0)
            with pytest.raises(WriterFenced):
                await w1.fact(2)

    run(main())


def test_9_2_a_fact_that_finds_the_claim_gone_ends_all_publishing() -> None:
    async def main() -> None:
        async with bench() as w1:
            await w1.fact(1)
            await w1.store.claim("w1", ["orders"], timeout=1)
            with pytest.raises(WriterFenced):
                await w1.fact(2)
            assert w1.writing.fenced is not None
            assert w1.published() == []
            assert w1.writing.generators["orders"].position == 1  # ID 2 is not completed

    run(main())


def test_9_3_a_beat_stores_nothing_above_an_open_fact() -> None:
    async def main() -> None:
        async with bench() as w1:
            async with Fact(w1.writing, (orders,)) as slow:
                assert slow.id == 1
                assert await w1.fact(2) == 2
                await w1.writing.beat()
                assert await w1.proven() == 0
            await w1.writing.beat()
            assert await w1.proven() == 2

    run(main())


def test_9_6_facts_are_handed_over_before_the_position_moves_past_them() -> None:
    async def main() -> None:
        async with bench("w2") as w1:

            async def keep_beating() -> None:
                while True:
                    await w1.writing.beat()
                    await asyncio.sleep(0)

            beating = asyncio.create_task(keep_beating())
            for turn in range(4):
                await asyncio.gather(*[w1.fact(number) for number in range(10)])
                assert w1.published() == [f"RDATA {10 * turn + number}" for number in range(1, 11)]
            beating.cancel()

    run(main())


def test_9_11_frames_of_the_own_name_by_another_incarnation_are_no_echoes() -> None:
    async def main() -> None:
        async with bench() as w1:
            own = w1.writing.incarnation
            assert w1.writing.others.is_echo(b"NAME w1 %d\nPOSITION typing w1 1 1" % own)
            for other in (b"NAME w1 %d" % (own + 1), b"NAME w1 %d" % (own - 1), b"NAME w1 %d0" % own, b"NAME w11 1"):
                assert not w1.writing.others.is_echo(other + b"\nPOSITION typing w1 1 1")

    run(main())


def test_9_16_a_writer_learns_nothing_from_one_of_another_log() -> None:
    async def main() -> None:
        async with bench("w2") as w1:
            ids, epoch = w1.writing.generators["orders"], await w1.store.epoch()
            w2 = name_of_w2(w1)
            hear(w1, f"SERVER bus {'f' * 32}", w2, "POSITION orders w2 5 5")
            hear(w1, w2, "POSITION orders w2 5 6", "RDATA orders w2 7 [1]")
            assert ids.highest == 0
            await w1.writing.beat()
            assert ids.position == 0  # nor follows it
            hear(w1, f"SERVER bus {epoch}", w2, "POSITION orders w2 0 1")
            hear(w1, w2, "RDATA orders w2 2 [1]")
            hear(w1, f"SERVER bus {epoch}", "NAME w2 1", "RDATA orders w2 9 [1]")  # has not noticed yet that it lost it
            assert ids.highest == 2

    run(main())


def test_9_15_a_sequence_that_went_back_is_refused_while_running() -> None:
    async def main() -> None:
        async with bench() as w1:
            await w1.fact(1)
            await w1.fact(2)
            w1.store.world.ask("UPDATE busrep_sequences SET value = 0 WHERE stream = 'orders'")
            with pytest.raises(SequenceWentBack) as caught:
                await w1.fact(3)
            assert caught.value.got == 1
            assert w1.published() == ["RDATA 1", "RDATA 2"]
            assert (await w1.store.fetch(FetchUpdates("orders", "w1", 0, 9, 100))).tokens == [1, 2]

    run(main())


# --- the reader core


def reader_at(position: int, *, held_bytes: int = 10_000, **options: Any) -> Reader:
    """Stream s of writer w, known up to there."""
    reader = Reader([Followed("s", **options)], settings=Settings(held_bytes=held_bytes))
    reader.start_at("s", "w", position)
    reader.connected(0.0)
    return reader


def delivered(reader: Reader) -> list[tuple[int, bytes]]:
    rows: list[tuple[int, bytes]] = []
    while (batch := reader.take("s", "w")) is not None:
        if isinstance(batch, RawBatch):
            rows += zip(batch.tokens, batch.payloads, strict=True)
        reader.done("s", "w")
    return rows


def test_9_11_a_step_back_without_name_of_a_writer_that_has_one_is_no_reset() -> None:
    reader = reader_at(15, resettable=True, fetchable=False)
    reader.receive(b"NAME w 3", 0.0)  # in an announcement of other streams
    reader.receive(b"POSITION s w 15 15", 0.0)
    reader.receive(b"POSITION s w 3 3", 0.0)
    assert reader.counters.resets == 0
    assert reader.positions() == {"s": {"w": 15}}


def test_9_13_after_an_overflow_all_lines_are_dropped_also_small_ones() -> None:
    reader = reader_at(5, held_bytes=2000)
    reader.receive(b"POSITION s w 6 6", 0.0)
    (asked,) = reader.fetches(0.0)
    reader.receive(b'RDATA s w batch "%b"' % (b"x" * 3000), 0.0)  # too large to hold
    reader.receive(b"RDATA s w 7 2", 0.0)  # the end of that fact: alone it would be half of it
    reader.receive_page(asked, UpdatesPage("s", "w", 5, 6, [6], [b"6"], False, "e"), 0.0)
    while fetches := reader.fetches(0.0):
        for asked in fetches:
            whole = {6: [b"6"], 7: [b"1", b"2"]}
            due = [token for token in whole if asked.after < token <= asked.upto]
            tokens = [token for token in due for _ in whole[token]]
            payloads = [payload for token in due for payload in whole[token]]
            page = UpdatesPage("s", "w", asked.after, asked.upto, tokens, payloads, False, "e")
            reader.receive_page(asked, page, 0.0)
    assert delivered(reader) in ([(6, b"6")], [(6, b"6"), (7, b"1"), (7, b"2")])
    assert reader.progress["s", "w"].state is State.UNSYNCED


def test_positions_of_a_reader_are_the_delivered_ones() -> None:
    reader = reader_at(5)
    reader.receive(b"POSITION s w 5 5\nRDATA s w 6 1", 0.0)
    assert reader.positions() == {"s": {"w": 5}}
    assert reader.delivered("s", "w") == 5
    assert delivered(reader) == [(6, b"1")]
    assert reader.positions() == {"s": {"w": 6}}


# --- what a database does between two statements


@pytest.mark.servers
def test_9_1_the_rows_are_read_after_the_transaction_was_seen_to_have_ended(on_postgres: Deployment) -> None:
    async def main() -> None:
        store: Any = await on_postgres.store_of()
        claim = await store.claim("w1", ["orders"], timeout=1)
        transaction = store.transaction(claim)
        (token,) = await store.reserve("orders", 1)
        await transaction.begin()
        await transaction.insert("orders", [(token, [[1]], [b"[1]"])])
        await transaction.execute("SELECT 1")
        question = facts.outcomes(store.dialect, claim, [(transaction.marker, [("orders", token)])])
        with psycopg.connect(on_postgres.store, autocommit=True) as connection:
            begin, first, *others = cast(tuple[Step, ...], next(question))
            answers = store_sync(connection)((begin,)) + store_sync(connection)((first,))
            await transaction.commit()  # after the first look, before the second
            answers += [answer for one in others for answer in store_sync(connection)((one,))]
            with pytest.raises(StopIteration) as stop:
                question.send(answers)
        assert stop.value.value in ([None], [{("orders", token): [b"[1]"]}])
        await store.close()

    run(main())


def store_sync(connection: Any) -> Callable[[tuple[Step, ...]], Answers]:
    from busrep.stores.postgres.steps import execute_steps

    return lambda steps: complete(execute_steps(connection, steps))


@pytest.mark.servers
def test_9_9_a_page_is_of_one_snapshot(on_postgres: Deployment) -> None:
    """Rows pruned between the look at the floor and the look at the rows would be lost without a word."""

    async def main() -> None:
        store: Any = await on_postgres.store_of()
        claim = await store.claim("w1", ["orders"], timeout=1)
        ids = await store.reserve("orders", 3)
        transaction = store.transaction(claim)
        await transaction.begin()
        await transaction.insert("orders", [(token, [[1]], [b"[1]"]) for token in ids])
        await transaction.commit()
        await store.heartbeat(claim, {"orders": 3})
        pruned = asyncio.Event()
        loop = asyncio.get_running_loop()

        def prune() -> None:
            asyncio.run_coroutine_threadsafe(store.prune(keep=0), loop).result(10)
            pruned.set()

        def fetch() -> UpdatesPage:
            with psycopg.connect(on_postgres.store, autocommit=True) as connection:
                execute = store_sync(connection)

                def one_by_one(steps: tuple[Step, ...]) -> Answers:
                    answers: Answers = []
                    for at, step in enumerate(steps):
                        answers += execute((step,))
                        if at == 1:  # BEGIN, then epoch, floor and position
                            prune()
                    return answers

                plan = facts.fetch(store.dialect, FetchUpdates("orders", "w1", 0, 3, 100))
                return run_sync(plan, one_by_one)

        found = await asyncio.to_thread(fetch)
        assert pruned.is_set()
        assert (found.upto, list(found.tokens)) == (3, ids)
        await store.close()

    run(main())


@pytest.mark.servers
def test_9_5_rows_and_sequence_are_read_after_the_fence_was_granted(on_postgres: Deployment) -> None:
    """What the silent writer's last transaction still does while the fence waits for it counts."""

    async def main() -> None:
        store: Any = await on_postgres.store_of()
        claim = await store.claim("w1", ["orders"], timeout=1)
        transaction = store.transaction(claim)
        await store.reserve("orders", 1)
        await transaction.begin()
        finishing = asyncio.create_task(store.finish("w1", claim.incarnation, timeout=10))
        with psycopg.connect(on_postgres.store, autocommit=True) as connection:
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = %s"
            database = connection.info.dbname
            await until(lambda: connection.execute(waiting, (database,)).fetchone() != (0,))
        (late,) = await store.reserve("orders", 1)
        (unused,) = await store.reserve("orders", 1)
        await transaction.insert("orders", [(late, [[1]], [b"[1]"])])
        await transaction.commit()
        assert await finishing == {"orders": unused}
        await store.close()

    run(main())


@pytest.mark.servers
def test_9_5_nobody_claims_the_name_while_its_final_positions_are_taken(on_postgres: Deployment) -> None:
    async def main() -> None:
        store: Any = await on_postgres.store_of()
        claim = await store.claim("w1", ["orders"], timeout=1)
        loop = asyncio.get_running_loop()
        blocked: list[bool] = []

        def finish() -> dict[str, int]:
            with psycopg.connect(on_postgres.store, autocommit=True) as connection:
                execute = store_sync(connection)

                def claim_meanwhile(steps: tuple[Step, ...]) -> Answers:
                    answers = execute(steps)
                    if any(isinstance(step, Sql) and "finished FROM busrep_positions" in step.text for step in steps):
                        claiming = store.claim("w1", ["orders"], timeout=0.2)
                        with contextlib.suppress(ClaimBlocked):
                            asyncio.run_coroutine_threadsafe(claiming, loop).result(10)
                            blocked.append(False)
                        blocked.append(True)
                    return answers

                plan = fencing.finish(store.dialect, "w1", claim.incarnation, timeout=5.0)
                return run_sync(plan, claim_meanwhile)

        assert await asyncio.to_thread(finish) == {"orders": 0}
        assert blocked == [True]
        await store.close()

    run(main())


# --- whole buses


@pytest.mark.servers
def test_9_1_a_joined_transaction_may_commit_though_the_fact_s_block_failed(on_postgres: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        insert = "INSERT INTO busrep_facts (stream, writer, id, idx, row) VALUES ('orders', 'w1', %s, 0, %s)"
        async with (
            on_postgres.bus(writer="w1") as writer,
            on_postgres.bus() as reader,
            await psycopg.AsyncConnection.connect(on_postgres.store) as connection,
        ):
            reader.subscribe(orders)(seen)
            # From now on it hears, and asks the table nothing.
            await reader.wait_for(orders, "w1", await write(writer, 0))
            async with connection.transaction():
                with pytest.raises(ValueError, match="of the block alone"):
                    async with writer.write(orders, connection=connection) as fact:
                        await connection.execute(insert, (fact.id, '[1,"by the application"]'))
                        raise ValueError("of the block alone")
                last = await write(writer, 2)
                await writer.settle()
                with pytest.raises(WaitTimeout):
                    await reader.wait_for(orders, "w1", last, timeout=0.2)
            await reader.wait_for(orders, "w1", last)
            assert seen.numbers == [0, 1, 2]

    run(main())


@pytest.mark.servers
@pytest.mark.parametrize("arrived", [True, False], ids=["arrived", "lost"])
def test_9_6_after_a_publish_of_unknown_outcome_the_same_frame_goes_out_again(
    deployment: Deployment, arrived: bool
) -> None:
    async def main() -> None:
        seen, sent = Seen(), []
        calm = attrs.evolve(QUICK, heartbeat=600.0, redis_timeout=60.0)  # a busy machine gives up no publish of its own
        async with deployment.bus(writer="w1", settings=calm) as writer, deployment.bus(settings=calm) as reader:
            reader.subscribe(orders)(seen)
            await reader.wait_for(orders, "w1", await write(writer, 1))
            link = writer.link
            publish = link.publish

            async def fail_once(messages: Any) -> None:
                frames = [data for _, data in messages if b"RDATA" in data]
                sent.extend(frames)
                failing = frames and len(sent) == len(frames)
                if arrived or not failing:
                    await publish(messages)
                if failing:
                    await link._drop_publisher()
                    raise Unavailable("Redis", "no answer")

            link.publish = fail_once  # type: ignore[method-assign]
            await reader.wait_for(orders, "w1", await write(writer, 2))
            await reader.wait_for(orders, "w1", await write(writer, 3))
            assert seen.numbers == [1, 2, 3]
            assert writer.writing is not None
            name = b"NAME w1 %d\n" % writer.writing.incarnation
            assert sent[0] == sent[1] == name + b'POSITION orders w1 1 1\nRDATA orders w1 2 [2,"new"]'
            assert sent[2:] == [name + b'POSITION orders w1 2 2\nRDATA orders w1 3 [3,"new"]']
            await until(lambda: writer.positions()["orders"]["w1"] == 3)  # Redis may say so after the reader has it
            assert writer.statistics()["writer"]["publish_failures"] == 1

    run(main())


@pytest.mark.servers
def test_9_6_frames_leave_in_the_order_in_which_they_were_composed(deployment: Deployment) -> None:
    async def main() -> None:
        lines: list[bytes] = []
        small = attrs.evolve(QUICK, frame_rows=1)
        async with deployment.bus(writer="w1", settings=small) as writer, deployment.bus() as reader:
            writer.on_line(lambda way, _, line: lines.append(line) if way == ">" else None)
            await write(writer, 0)
            ids = await writer.publish(orders, [Order(number, "new") for number in range(8)])
            await reader.wait_for(orders, "w1", ids[-1])
            tokens = [int(line.split(b" ")[3]) for line in lines if line.startswith(b"RDATA ")]
            assert tokens == [1, *ids]

    run(main())


@pytest.mark.servers
def test_a_writer_announces_itself_when_only_its_publishing_connection_was_lost(deployment: Deployment) -> None:
    async def main() -> None:
        calm = attrs.evolve(QUICK, heartbeat=600.0)
        async with deployment.bus(writer="w1", settings=calm) as writer:
            await until(lambda: writer.statistics()["writer"]["announcements"])
            await asyncio.sleep(0.2)  # the own REPLICATE's answer too
            lines: list[bytes] = []
            writer.on_line(lambda way, _, line: lines.append(line) if way == ">" else None)
            await writer.link._drop_publisher()
            await write(writer, 1)
            await until(lambda: any(line.startswith(b"SERVER ") for line in lines))

    run(main())


@pytest.mark.servers
def test_9_7_a_writer_counts_from_its_registration_though_nobody_has_heard_it(deployment: Deployment) -> None:
    async def main() -> None:
        calm = attrs.evolve(QUICK, heartbeat=600.0)
        async with deployment.bus(writer="w1") as w1, deployment.bus(settings=calm) as reader:
            reader.subscribe(orders)(Seen())
            await reader.wait_for(orders, "w1", await write(w1, 1))
            store = await deployment.store_of()
            await store.claim("w2", ["orders"], timeout=1)
            (reserved,) = await store.reserve("orders", 1)
            await reader.wait_for(orders, "w1", await write(w1, 2))
            assert await reader.linear_position(orders) < reserved
            await store.close()

    run(main())


@pytest.mark.servers
def test_9_7_a_linear_position_is_of_positions_known_before_the_registry_was_read(deployment: Deployment) -> None:
    async def main() -> None:
        calm = attrs.evolve(QUICK, heartbeat=600.0)
        async with deployment.bus(writer="w1") as w1, deployment.bus(settings=calm) as reader:
            reader.subscribe(orders)(Seen())
            await reader.wait_for(orders, "w1", await write(w1, 1))
            store = await deployment.store_of()
            known, reserved = reader.store.known, []  # type: ignore[union-attr]

            async def slow(epoch: str) -> Any:
                listed = await known(epoch)
                await store.claim("w2", ["orders"], timeout=1)
                reserved.extend(await store.reserve("orders", 1))  # open
                await reader.wait_for(orders, "w1", await write(w1, 2))
                return listed

            reader.store.known = slow  # type: ignore[union-attr,method-assign]
            assert await reader.linear_position(orders) < reserved[0]
            await store.close()

    run(main())


@pytest.mark.servers
def test_9_7_a_writer_that_left_counts_until_its_last_rows_were_handled(deployment: Deployment) -> None:
    async def main() -> None:
        calm = attrs.evolve(QUICK, heartbeat=600.0)
        async with deployment.bus(writer="w1") as w1, deployment.bus(settings=calm) as reader:
            reader.subscribe(orders)(Seen())
            await reader.wait_for(orders, "w1", await write(w1, 1))
            store = await deployment.store_of()
            claim = await store.claim("w2", ["orders"], timeout=1)
            (token,) = await store.reserve("orders", 1)
            transaction = store.transaction(claim)
            await transaction.begin()
            await transaction.insert("orders", [(token, [[2, "never published"]], [b'[2,"never published"]'])])
            await transaction.commit()
            assert await store.finish("w2", claim.incarnation, timeout=1) == {"orders": token}
            await reader.wait_for(orders, "w1", await write(w1, 3))
            assert await reader.linear_position(orders) < token
            await store.close()

    run(main())


@pytest.mark.servers
def test_9_12_the_row_to_save_to_is_inserted_at_registration(deployment: Deployment) -> None:
    async def main() -> None:
        store = await deployment.store_of()
        late = attrs.evolve(QUICK, save_every=600.0)
        found: list[Any] = []
        async with deployment.bus(writer="w1") as w1:
            await write(w1, 1)
            async with deployment.bus(reader="billing", settings=late) as reader:

                @reader.subscribe(orders)
                async def handle(batch: Any) -> None:
                    state = await store.load_reader("billing")
                    found.append((batch.writer, state.positions.get(("orders", batch.writer))))

                await reader.wait_for(orders, "w1", 1)
                async with deployment.bus(writer="joins") as joins:
                    last = await write(joins, 2)
                    await reader.wait_for(orders, "joins", last)
        assert [writer for writer, _ in found] == ["w1", "joins"]
        assert found[0] == ("w1", 0)
        assert found[1][1] is not None
        assert found[1][1] < last
        await store.close()

    run(main())


@pytest.mark.servers
def test_9_12_where_a_reader_from_now_on_begins_is_saved_at_registration(deployment: Deployment) -> None:
    """It may be killed before its first save: then it owes its handlers what comes from here on."""

    async def main() -> None:
        store = await deployment.store_of()
        late = attrs.evolve(QUICK, save_every=600.0)
        async with deployment.bus(writer="w1") as w1:
            last = await write(w1, 1)
            while [one.position for one in await store.known() if one.stream == "orders"] != [last]:
                await asyncio.sleep(0.01)
            async with deployment.bus(reader="billing", settings=late, start="now") as reader:
                reader.subscribe(orders)(Seen())
                await reader.wait_for(orders, "w1", last)
                assert (await store.load_reader("billing")).positions["orders", "w1"] == last
        await store.close()

    run(main())


@pytest.mark.servers
def test_9_12_positions_of_the_old_log_are_not_saved_over_those_of_the_new(deployment: Deployment) -> None:
    path = deployment.store.removeprefix("sqlite:///")

    async def main() -> None:
        store = await deployment.store_of()
        moved: list[ReaderMoved] = []
        calm = attrs.evolve(QUICK, save_every=600.0, heartbeat=600.0)
        async with (
            deployment.bus(writer="w1", settings=calm) as w1,
            deployment.bus(reader="billing", settings=calm, on_epoch_change="stop") as reader,
        ):

            @reader.subscribe(orders)
            async def handle(batch: Any) -> None:
                if moved:
                    return
                epoch = await store.restored()  # and another process of this name has seen it
                await store.reset_reader("billing", {("orders", "w1"): batch.after}, epoch)
                with contextlib.closing(sqlite3.connect(path, timeout=2)) as connection:
                    connection.execute("BEGIN IMMEDIATE")
                    with pytest.raises(ReaderMoved) as caught:
                        await batch.save(connection)
                    moved.append(caught.value)
                    connection.rollback()

            await write(w1, 1)
            await until(lambda: moved)
        await store.close()

    run(main())


@pytest.mark.servers
def test_9_12_a_timed_save_that_finds_another_position_reloads_and_never_goes_back(deployment: Deployment) -> None:
    key = ("orders", "w1")

    async def main() -> None:
        store = await deployment.store_of()
        late = attrs.evolve(QUICK, save_every=600.0)
        async with deployment.bus(writer="w1") as w1, deployment.bus(reader="billing", settings=late) as reader:
            reader.subscribe(orders)(Seen())
            await reader.wait_for(orders, "w1", await write(w1, 1))
            await reader.reading.saver.save([key], busy=True)
            # A twin, further than the sequence is yet: nothing that a save of today would do (9.17).
            with contextlib.closing(sqlite3.connect(deployment.store.removeprefix("sqlite:///"))) as twin:
                twin.execute("UPDATE busrep_readers SET position = 3 WHERE writer = 'w1'")
                twin.commit()
            await reader.wait_for(orders, "w1", await write(w1, 2))
            for _ in range(2):
                await reader.reading.saver.save([key], busy=True)
                assert (await store.load_reader("billing")).positions == {key: 3}
            await reader.wait_for(orders, "w1", await write(w1, 3, 4))
            await reader.reading.saver.save([key], busy=True)
            assert (await store.load_reader("billing")).positions == {key: 4}
        await store.close()

    run(main())


@pytest.mark.servers
def test_9_12_a_handler_s_save_never_takes_back_what_another_process_saved(deployment: Deployment) -> None:
    """Two processes under one name: one of them learns how far the other is before its next batch is saved."""
    path = deployment.store.removeprefix("sqlite:///")
    here, there = ("orders", "w1"), ("payments", "w1")

    async def main() -> None:
        store = await deployment.store_of()
        effects: list[int] = []
        waiting, go_on = asyncio.Event(), asyncio.Event()
        never = attrs.evolve(QUICK, save_every=1e9)  # also not the first time, whatever the loop's clock shows
        async with deployment.bus(writer="w1") as w1, deployment.bus(reader="billing", settings=never) as reader:

            @reader.subscribe(orders)
            async def handle(batch: Any) -> None:
                if batch.after == 1:
                    waiting.set()
                    await go_on.wait()
                with contextlib.closing(sqlite3.connect(path, timeout=5)) as connection:
                    connection.execute("BEGIN IMMEDIATE")
                    await batch.save(connection)
                    connection.commit()
                effects.extend(row.number for row in batch.rows)

            reader.subscribe(payments)(Seen())
            await reader.wait_for(orders, "w1", await write(w1, 1))
            await reader.wait_for(payments, "w1", await write(w1, 1, stream=payments))
            await write(w1, 2, 3)
            await waiting.wait()
            await store.save_reader("billing", [(*here, 1, 3), (*there, 0, 1)], await store.epoch())
            await reader.reading.saver.save([here, there], busy=True)
            go_on.set()
            await reader.wait_for(orders, "w1", await write(w1, 4))
            assert effects == [1, 4]  # the other one has handled 2 and 3
            assert (await store.load_reader("billing")).positions[here] == 4
        await store.close()

    run(main())


@pytest.mark.servers
def test_9_12_a_handler_that_saves_while_a_timed_save_reloads_is_not_called_again(deployment: Deployment) -> None:
    """What was read before the handler committed says less than the handler knows."""
    path = deployment.store.removeprefix("sqlite:///")
    here, there = ("orders", "w1"), ("payments", "w1")

    async def main() -> None:
        store = await deployment.store_of()
        calls: list[int] = []
        waiting, go_on = asyncio.Event(), asyncio.Event()
        never = attrs.evolve(QUICK, save_every=1e9)  # also not the first time, whatever the loop's clock shows
        async with deployment.bus(writer="w1") as w1, deployment.bus(reader="billing", settings=never) as reader:
            reading = reader.reading

            @reader.subscribe(orders)
            async def handle(batch: Any) -> None:
                calls.extend(row.number for row in batch.rows)
                if batch.after == 1:
                    waiting.set()
                    await go_on.wait()
                with contextlib.closing(sqlite3.connect(path, timeout=5)) as connection:
                    connection.execute("BEGIN IMMEDIATE")
                    await batch.save(connection)
                    connection.commit()

            reader.subscribe(payments)(Seen())
            await reader.wait_for(orders, "w1", await write(w1, 1))
            await reader.wait_for(payments, "w1", await write(w1, 1, stream=payments))
            last = await write(w1, 2)
            await waiting.wait()
            # As after a save whose COMMIT got no answer.
            await store.save_reader("billing", [(*there, 0, 1)], await store.epoch())
            gate = Gate(reading.reader_store, "load_reader", after=True)
            saving = asyncio.create_task(reading.saver.save([here, there]))
            await gate.at.wait()
            go_on.set()
            await reader.wait_for(orders, "w1", last)
            gate.go_on.set()
            await saving
            await reader.wait_for(orders, "w1", await write(w1, 3))
            assert calls == [1, 2, 3]
            assert reading.saved.at == {here: 3, there: 1}
        await store.close()

    run(main())


@pytest.mark.servers
@pytest.mark.parametrize("noticed", ["while it reads", "at its start"])
def test_9_12_what_another_process_handled_in_the_new_log_is_not_handled_again(
    deployment: Deployment, noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes under one name: the second to notice a restore goes on where the first is by then."""

    async def main() -> None:
        seen = Seen()
        store = await deployment.store_of()
        calm = attrs.evolve(QUICK, heartbeat=600.0)
        async with deployment.bus(writer="w1") as w1, deployment.bus(reader="billing") as reader:
            reader.subscribe(orders)(Seen())
            await reader.wait_for(orders, "w1", await write(w1, 1, 2))

        async def the_other_is_first() -> str:
            epoch: str = await store.restored()
            await store.reset_reader("billing", {("orders", ""): 0, ("orders", "w1"): 0}, epoch)
            await store.save_reader("billing", [("orders", "w1", 0, 2)], epoch)
            return epoch

        async with deployment.bus(reader="billing", settings=calm) as reader:
            core = reader.reading.core
            if noticed == "while it reads":
                reader.subscribe(orders)(seen)
                await until(lambda: ("orders", "w1") in core.progress)
                epoch = await the_other_is_first()
                core.doubt(epoch)
                reader.reading.pump()
            else:
                of_reader = reader.reading.reader_store
                assert of_reader is not None
                load = of_reader.load_reader
                answers = [await load("billing")]  # read just before the other one began anew
                epoch = await the_other_is_first()

                async def load_reader(name: str) -> Any:
                    return answers.pop() if answers else await load(name)

                monkeypatch.setattr(of_reader, "load_reader", load_reader)
                reader.subscribe(orders)(seen)
            await until(lambda: core.progress and core.epoch == epoch)
            async with deployment.bus(writer="w1") as again:
                await reader.wait_for(orders, "w1", await write(again, 3))
            assert seen.numbers == [3]
        await store.close()

    run(main())


@pytest.mark.servers
def test_9_16_a_writer_from_before_a_restore_proves_nothing_to_readers_of_the_new_log(deployment: Deployment) -> None:
    """It does not know yet that it is fenced, and says what is true of the log that is gone."""

    async def main() -> None:
        seen = Seen()
        resets: list[Any] = []
        store = await deployment.store_of()
        client = redis.asyncio.Redis.from_url(deployment.redis)
        old = await store.epoch()
        calm = attrs.evolve(QUICK, heartbeat=600.0)
        async with deployment.bus(writer="w1", settings=calm) as w1, deployment.bus(settings=calm) as reader:
            reader.subscribe(orders)(seen)
            reader.on_reset(orders)(lambda *args: resets.append(args))
            await reader.wait_for(orders, "w1", await write(w1, 1))
            assert w1.writing is not None
            name = f"NAME w1 {w1.writing.incarnation}\n"
            await store.restored()
            async with deployment.bus(writer="w2", settings=calm) as w2:
                await until(lambda: resets)
                for opening in (f"SERVER {deployment.name} {old}\n{name}", name):
                    await client.publish(deployment.name, f"{opening}POSITION orders w1 1 50")
                await until(lambda: reader.statistics()["reader"]["other_logs"] >= 2)
                assert w2.writing is not None
                assert w2.writing.generators["orders"].highest < 50
            async with deployment.bus(writer="w1", settings=calm) as again:
                await reader.wait_for(orders, "w1", await write(again, 2))
                assert seen.numbers == [1, 1, 2]
        await client.aclose()
        await store.close()

    run(main())


@pytest.mark.servers
def test_a_restore_that_no_writer_lives_to_announce_is_noticed(deployment: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        resets: list[Any] = []
        store = await deployment.store_of()
        async with deployment.bus() as reader:
            reader.subscribe(orders)(seen)
            reader.on_reset(orders)(lambda *args: resets.append(args))
            async with deployment.bus(writer="w1") as w1:
                await reader.wait_for(orders, "w1", await write(w1, 1))
            epoch = await store.restored()
            await until(lambda: resets)
            assert reader.reading.core.epoch == epoch
            await until(lambda: seen.numbers == [1, 1])
        await store.close()

    run(main())


@pytest.mark.servers
def test_a_sequence_of_a_restored_log_stops_nobody_who_has_not_seen_its_epoch(deployment: Deployment) -> None:
    path = deployment.store.removeprefix("sqlite:///")

    async def main() -> None:
        seen = Seen()
        resets: list[Any] = []
        store = await deployment.store_of()
        calm = attrs.evolve(QUICK, heartbeat=600.0)
        async with deployment.bus(settings=calm) as reader:
            reader.subscribe(orders)(seen)
            reader.on_reset(orders)(lambda *args: resets.append(args))
            async with deployment.bus(writer="w1", settings=calm) as w1:
                await reader.wait_for(orders, "w1", await write(w1, 1, 2, 3))
            with contextlib.closing(sqlite3.connect(path, timeout=5)) as connection:
                connection.execute("DELETE FROM busrep_facts WHERE id > 1")
                connection.execute("UPDATE busrep_sequences SET value = 1 WHERE stream = 'orders'")
                connection.commit()
            await store.restored()
            reader.reading.core.stepped_back["orders", "w1"] = None  # heard before the new epoch was
            await reader.reading.look_after_silent(all_known=False)
            assert reader.reading.stopped == {}
            reader.reading.pump()
            await until(lambda: resets)
            await until(lambda: seen.numbers == [1, 2, 3, 1])
        await store.close()

    run(main())


@pytest.mark.servers
def test_what_stopped_in_the_old_log_goes_on_in_the_new_one(deployment: Deployment) -> None:
    async def main() -> None:
        numbers: list[int] = []
        poisoned = True
        store = await deployment.store_of()
        settings = attrs.evolve(QUICK, handler_retries=0)
        async with deployment.bus(settings=settings) as reader:

            @reader.subscribe(orders)
            def handle(batch: Any) -> None:
                if poisoned:
                    raise ValueError("poison")
                numbers.extend(row.number for row in batch.rows)

            async with deployment.bus(writer="w1") as w1:
                await write(w1, 1)
                await until(lambda: reader.reading.stopped)
            poisoned = False
            await store.restored()
            await until(lambda: numbers == [1])
            assert reader.reading.stopped == {}
            async with deployment.bus(writer="w1") as again:
                await reader.wait_for(orders, "w1", await write(again, 2))
        assert numbers == [1, 2]
        await store.close()

    run(main())


@pytest.mark.servers
def test_9_14_what_follows_a_lost_link_is_not_trusted_before_a_position(deployment: Deployment) -> None:
    async def main() -> None:
        rows: list[Any] = []
        missed: list[Any] = []
        asked: list[bytes] = []
        calm = attrs.evolve(QUICK, heartbeat=600.0)
        client = redis.asyncio.Redis.from_url(deployment.redis)

        async def publish(*lines: str) -> None:
            for line in lines:
                await client.publish(deployment.name, line)

        async with deployment.bus(store=None, streams=[typing], settings=calm) as reader:
            reader.on_line(lambda way, _, line: asked.append(line) if way == ">" else None)
            reader.subscribe(typing)(lambda batch: rows.extend(batch.rows))
            reader.on_missed(typing)(lambda *args: missed.append(args))
            await until(lambda: "typing" in reader.reading.core.followed)
            await publish("POSITION typing f 5 5", "RDATA typing f 6 1", "RDATA typing f batch 2")
            await until(lambda: rows == [1])
            asked.clear()
            before = reader.statistics()["link"]["reconnects"]
            await client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")  # type: ignore[no-untyped-call]
            await until(lambda: reader.statistics()["link"]["reconnects"] > before)
            await until(lambda: reader.statistics()["link"]["connected"])
            await until(lambda: b"REPLICATE" in asked)
            await publish("RDATA typing f 8 4", "POSITION typing f 8 8", "RDATA typing f 9 5")
            await until(lambda: 5 in rows)
            assert rows == [1, 5]
            assert [where[1:] for where in missed][-1] == ("f", 6, 8)
        await client.aclose()

    run(main())


@pytest.mark.servers
@pytest.mark.parametrize("who", ["writer", "reader", "reader that heard nobody"])
def test_hearing_nothing_for_five_beats_forces_a_reconnect(deployment: Deployment, who: str) -> None:
    """A subscription that Redis forgot still answers PING; a reader that heard nobody has nothing but PING."""

    async def main() -> None:
        patient = attrs.evolve(QUICK, silent_after_beats=600)  # a busy machine is no reason for it to reconnect
        async with FaultyLink(deployment.redis) as proxy, deployment.bus(writer="w1", settings=patient) as w1:
            options = {"writer": {"writer": "w2"}, "reader": {}}.get(who, {"name": f"{deployment.name}-alone"})
            async with deployment.bus(redis=proxy.url, **options) as deaf:
                reconnects = deaf.statistics()["link"]["reconnects"]
                if who == "reader that heard nobody":
                    proxy.black_hole()
                    await until(lambda: deaf.statistics()["link"]["last_error"])
                    proxy.heal()
                else:
                    await until(lambda: "w1" in deaf.reading.core.last_heard)
                    # Without any subscription left PING would be answered in another form, which tells as well.
                    await deaf.link._subscriber.send_command("SUBSCRIBE", f"{deployment.name}-elsewhere")
                    await deaf.link._subscriber.send_command("UNSUBSCRIBE", deployment.name)
                    if who == "writer":  # others it does not miss: then the own echo is all that tells
                        deaf.reading.core.last_heard.clear()
                await until(lambda: deaf.statistics()["link"]["reconnects"] > reconnects)
                await until(lambda: deaf.statistics()["link"]["connected"])
            assert w1.statistics()["link"]["reconnects"] == 0

    run(main())


@pytest.mark.servers
def test_what_was_received_and_not_handled_is_neither_saved_nor_waited_for(deployment: Deployment) -> None:
    async def main() -> None:
        store, go_on, at_work = await deployment.store_of(), asyncio.Event(), asyncio.Event()
        async with deployment.bus(writer="w1") as w1, deployment.bus(reader="billing") as reader:

            @reader.subscribe(orders)
            async def handle(batch: Any) -> None:
                at_work.set()
                await go_on.wait()

            last = await write(w1, 1, 2)
            await at_work.wait()
            progress = reader.reading.core.progress["orders", "w1"]
            await until(lambda: progress.position == last)
            with pytest.raises(WaitTimeout):
                await reader.wait_for(orders, "w1", last, timeout=0.2)
            await reader.reading.saver.save([("orders", "w1")], busy=True)
            assert (await store.load_reader("billing")).positions == {("orders", "w1"): 0}
            assert reader.positions()["orders"]["w1"] == 0
            assert await reader.linear_position(orders) == 0
            waiting = asyncio.create_task(reader.wait_for(orders, "w1", last))
            await asyncio.sleep(0)
            reader.reading.pump()
            await asyncio.sleep(0)
            assert not waiting.done()
            go_on.set()
            await waiting
            await until(lambda: reader.positions()["orders"]["w1"] == last)
        assert (await store.load_reader("billing")).positions == {("orders", "w1"): last}
        await store.close()

    run(main())


@pytest.mark.servers
def test_a_replicate_is_answered_at_once(deployment: Deployment) -> None:
    async def main() -> None:
        calm = attrs.evolve(QUICK, heartbeat=600.0)
        async with deployment.bus(writer="w1", settings=calm) as writer:
            await until(lambda: writer.statistics()["writer"]["announcements"])
            await asyncio.sleep(0.2)  # the own REPLICATE's answer too
            before = writer.statistics()["writer"]["announcements"]
            client = redis.asyncio.Redis.from_url(deployment.redis)
            await client.publish(deployment.name, "REPLICATE")
            await until(lambda: writer.statistics()["writer"]["announcements"] > before)
            await client.aclose()

    run(main())


@pytest.mark.servers
def test_saved_positions_of_another_epoch_are_not_gone_on_from(deployment: Deployment) -> None:
    async def main() -> None:
        async with deployment.bus(writer="w1") as w1:
            async with deployment.bus(reader="billing") as reader:
                reader.subscribe(orders)(Seen())
                await reader.wait_for(orders, "w1", await write(w1, 1, 2))
        store = await deployment.store_of()
        await store.restored()
        await store.close()
        async with deployment.bus(reader="billing", on_epoch_change="stop") as reader:
            with pytest.raises(EpochChanged):
                await reader.wait_for(orders, "w1", 1)
        seen = Seen()
        async with deployment.bus(reader="billing") as reader:
            reader.subscribe(orders)(seen)
            await until(lambda: seen.numbers == [1, 2])

    run(main())


@pytest.mark.servers
def test_9_7_streams_that_do_not_follow_have_no_linear_position(deployment: Deployment) -> None:
    alone = Stream("alone", Order, follows=False)

    async def main() -> None:
        store = open_store(deployment.store, Registry([alone]))
        await store.init()
        await store.close()
        async with deployment.bus(streams=[alone]) as reader:
            with pytest.raises(ConfigError, match="linear"):
                await reader.linear_position(alone)

    run(main())


@pytest.mark.servers
def test_9_8_a_writer_hears_the_rows_of_the_others(deployment: Deployment) -> None:
    async def main() -> None:
        calm = attrs.evolve(QUICK, heartbeat=600.0)
        async with (
            deployment.bus(writer="w2", settings=calm) as w2,  # before the other reads the registry
            deployment.bus(writer="w1", settings=calm) as w1,
        ):
            assert w1.writing is not None
            ids = w1.writing.generators["orders"]
            last = await write(w2, 1, 2)
            await until(lambda: ids.highest == last)

    run(main())


@pytest.mark.servers
def test_9_11_a_lower_incarnation_of_the_own_name_stops_nobody(deployment: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        async with deployment.bus(writer="w1") as first:
            assert first.writing is not None
            lower = Name("w1", first.writing.incarnation)
        async with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
            reader.subscribe(orders)(seen)
            client = redis.asyncio.Redis.from_url(deployment.redis)
            await client.publish(deployment.name, lower.format())
            await reader.wait_for(orders, "w1", await write(writer, 1))
            await client.aclose()
            assert writer.statistics()["writer"]["fenced"] is False
            assert seen.numbers == [1]

    run(main())


# -- a log that is set back, or begins anew, while everybody is at work ----------------------------------------


def kept(shop: MemoryDeployment) -> list[str]:
    """A backup of the table: the statements that make it."""
    return list(memory.world_of(shop.name).connection.iterdump())


def emptied(shop: MemoryDeployment) -> memory.World:
    """The table without anything."""
    world = memory.world_of(shop.name)
    for (table,) in world.ask("SELECT name FROM sqlite_master WHERE type = 'table'"):
        world.ask(f"DROP TABLE {table}")
    return world


async def set_back(shop: MemoryDeployment, backup: list[str]) -> str:
    """Restore the backup, and declare it; the new epoch."""
    emptied(shop).connection.executescript("\n".join(backup))
    return await open_store(shop.store, Registry(shop.streams)).restored()


def simulated(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run in virtual time, incarnations by its clock."""

    async def bounded() -> None:
        clock = asyncio.get_running_loop().time
        with mock.patch("time.time_ns", side_effect=lambda: int((1e9 + clock()) * 1e9)):
            async with asyncio.timeout(60):
                await work()

    virtual.run(bounded())


async def at_epoch(bus: Bus, epoch: str) -> None:
    await until(lambda: bus.reading.core.epoch == epoch)


def test_9_16_a_handler_at_work_in_the_log_before_is_told_of_the_reset() -> None:
    async def main() -> None:
        told: list[Any] = []
        at_work, go_on = asyncio.Event(), asyncio.Event()
        async with MemoryDeployment(orders) as shop, shop.bus(reader="r") as reader, shop.bus(writer="w1") as w1:
            reader.on_reset(orders)(lambda *reset: told.append(reset))

            @reader.subscribe(orders)
            async def handle(batch: Batch[Order]) -> None:
                at_work.set()
                await go_on.wait()
                await batch.save(None)
                told.extend(row.number for row in batch.rows)

            await write(w1, 1)
            await at_work.wait()
            await at_epoch(reader, await set_back(shop, kept(shop)))
            go_on.set()
            async with shop.bus(writer="w1") as again:
                await reader.wait_for(orders, "w1", await write(again, 2))
        assert told == [("orders", "w1", 0), 1, 2]

    simulated(main)


def test_9_16_a_reset_while_nobody_follows_is_told_of_before_the_next_rows() -> None:
    async def main() -> None:
        told: list[Any] = []
        async with MemoryDeployment(orders) as shop, shop.bus(reader="r") as reader, shop.bus(writer="w1") as w1:
            reader.on_reset(orders)(lambda *reset: told.append(reset))

            async def handle_one() -> None:
                async with contextlib.aclosing(reader.follow(orders)) as batches:
                    batch = await anext(batches)
                    await batch.save(None)
                    told.extend(row.number for row in batch.rows)

            await write(w1, 1)
            await handle_one()
            await at_epoch(reader, await set_back(shop, kept(shop)))
            await handle_one()
        assert told == [1, ("orders", "w1", 0), 1]

    simulated(main)


def test_9_11_rows_of_a_former_life_that_nobody_can_handle_do_not_stop_the_new_one() -> None:
    async def main() -> None:
        told: list[Any] = []
        at_work, go_on = asyncio.Event(), asyncio.Event()
        impatient = attrs.evolve(MEMORY, handler_retries=0)
        async with MemoryDeployment(typing, settings=impatient) as shop, shop.bus() as reader:
            reader.on_reset(typing)(lambda *reset: told.append(reset))

            @reader.subscribe(typing)
            async def handle(batch: Batch[Any]) -> None:
                if batch.rows == [["poison"]]:
                    at_work.set()
                    await go_on.wait()
                    raise ValueError("of the former life")
                told.extend(batch.rows)

            async with shop.bus(writer="w1") as former:
                await former.publish(typing, [["a"]])
                await until(lambda: told)
                await former.publish(typing, [["poison"]])
                await at_work.wait()
            async with shop.bus(writer="w1") as later:
                await until(lambda: reader.statistics()["reader"]["resets"])
                go_on.set()
                await later.publish(typing, [["b"]])
                await until(lambda: ["b"] in told or reader.statistics()["reader"]["stopped"])
        assert told == [["a"], ("typing", "w1", 0), ["b"]]

    simulated(main)


def test_9_12_where_rows_of_the_log_before_ended_is_no_position_in_the_new_one() -> None:
    async def main() -> None:
        seen: list[int] = []
        at_work, go_on = asyncio.Event(), asyncio.Event()
        async with MemoryDeployment(orders) as shop, shop.bus(reader="r") as reader:

            @reader.subscribe(orders)
            async def handle(batch: Batch[Order]) -> None:
                await batch.save(None)
                if 99 in [row.number for row in batch.rows] and not go_on.is_set():
                    at_work.set()  # saved, and the answer takes its time
                    await go_on.wait()
                seen.extend(row.number for row in batch.rows)

            async with shop.bus(writer="w1") as w1:
                await reader.wait_for(orders, "w1", await write(w1, 1))
            backup = kept(shop)
            async with shop.bus(writer="w2") as w2:  # unknown to the backup
                await reader.wait_for(orders, "w2", await write(w2, *range(2, 12)))
                await write(w2, 99)
                await at_work.wait()
            epoch = await set_back(shop, backup)
            await at_epoch(reader, epoch)
            seen.clear()
            async with shop.bus(writer="w2") as w2:
                go_on.set()
                last = await write(w2, 100, 101, 102)
                await reader.wait_for(orders, "w2", last)
            assert [number for number in seen if number >= 100] == [100, 101, 102]
            assert (await open_store(shop.store, Registry([orders])).load_reader("r")).positions["orders", "w2"] == last

    simulated(main)


@pytest.mark.parametrize("rolling", [False, True], ids=["one after the other", "rolling"])
def test_9_11_a_name_that_gets_its_first_stream_with_a_table_is_heard_in_all_of_them(rolling: bool) -> None:
    """Its former process had no claim, and its incarnation was the clock."""

    async def main() -> None:
        seen: list[Any] = []
        async with MemoryDeployment(orders, typing) as shop, AsyncExitStack() as stack, shop.bus() as reader:
            reader.subscribe(orders)(lambda batch: seen.extend(row.number for row in batch.rows))
            reader.subscribe(typing)(lambda batch: seen.extend(batch.rows))
            former = await stack.enter_async_context(shop.bus(writer="w1", streams=[typing]))
            await former.publish(typing, [["a"]])
            await until(lambda: seen == [["a"]])
            if not rolling:
                await former.close()
            async with shop.bus(writer="w1") as later:
                await reader.wait_for(orders, "w1", await write(later, 1))
                await later.publish(typing, [["b"]])
                await until(lambda: seen == [["a"], 1, ["b"]])
                if rolling:
                    await until(lambda: former.statistics()["writer"]["fenced"])
                assert later.statistics()["writer"]["fenced"] is False

    simulated(main)


def test_9_16_a_writer_of_a_table_made_anew_is_heard_whatever_it_is_called() -> None:
    """Its incarnation may be lower than those that the old table gave out, where the clock was set back too."""

    async def main() -> None:
        seen: list[int] = []
        async with MemoryDeployment(orders) as shop, shop.bus() as reader:
            reader.subscribe(orders)(lambda batch: seen.extend(row.number for row in batch.rows))
            async with shop.bus(writer="w1") as former:
                await reader.wait_for(orders, "w1", await write(former, 1))
            emptied(shop)
            store = open_store(shop.store, Registry([orders]))
            await store.init()
            with mock.patch("time.time_ns", return_value=1000):
                async with shop.bus(writer="w1") as later:
                    await write(later, 10)
                    await at_epoch(reader, await store.epoch())
                    await write(later, 11)
                    await until(lambda: seen == [1, 10, 11])
                    assert later.writing is not None
                    assert former.writing is not None
                    assert later.writing.incarnation < former.writing.incarnation

    simulated(main)


def test_a_position_of_the_log_before_is_not_held_against_the_sequence_of_the_new_one() -> None:
    async def main() -> None:
        async with MemoryDeployment(orders) as shop, shop.bus() as reader, shop.bus(writer="w1") as w1:
            reader.subscribe(orders)(lambda _: None)
            await reader.wait_for(orders, "w1", await write(w1, 1))
            backup = kept(shop)
            await reader.wait_for(orders, "w1", await write(w1, 2, 3, 4))
            reading = reader.reading
            gate = Gate(reading.store, "sequence", after=True)
            epoch = await set_back(shop, backup)
            reading.core.stepped_back["orders", "w1"] = None
            looking = asyncio.create_task(reading.table.check_sequences())
            await gate.at.wait()
            async with shop.bus(writer="w1") as again:
                await at_epoch(reader, epoch)
                gate.go_on.set()
                await looking
                assert reading.stopped == {}
                await reader.wait_for(orders, "w1", await write(again, 5))

    simulated(main)


def test_what_a_forged_line_said_above_the_sequence_is_not_waited_for() -> None:
    async def main() -> None:
        async with MemoryDeployment(orders) as shop, shop.bus() as reader, shop.bus(writer="w1") as w1:
            reader.subscribe(orders)(lambda _: None)
            await reader.wait_for(orders, "w1", await write(w1, 1))
            assert w1.writing is not None
            opening = f"SERVER {shop.name} {w1.writing.epoch}\nNAME w1 {w1.writing.incarnation}\n"
            reader.receiver.receive(shop.name, f"{opening}POSITION orders w1 {10**17} {10**17}".encode())
            core = reader.reading.core
            assert core.progress["orders", "w1"].catching_up
            await until(lambda: core.progress["orders", "w1"].state is State.LIVE)
            found = core.counters.gaps_found
            await reader.wait_for(orders, "w1", await write(w1, 2, 3))
            assert core.counters.gaps_found == found == 1

    simulated(main)


def test_rows_pruned_from_the_log_before_stop_nobody_in_the_new_one() -> None:
    async def main() -> None:
        async with MemoryDeployment(orders) as shop, shop.bus(reader="r") as reader, shop.bus(writer="w1") as w1:
            reader.subscribe(orders)(lambda _: None)
            await reader.wait_for(orders, "w1", await write(w1, 1))
            reading = reader.reading
            gate = Gate(reading.reader_store, "load_reader", after=True, when=lambda _: not gate.at.is_set())
            looking = asyncio.create_task(reading.saver.handled_by_peer(PositionTooOld("orders", "w1", 5, 9)))
            await gate.at.wait()
            await at_epoch(reader, await set_back(shop, kept(shop)))
            gate.go_on.set()
            assert await looking  # the floor of a log that is gone: there is nothing to give up
            async with shop.bus(writer="w1") as again:
                await reader.wait_for(orders, "w1", await write(again, 2))

    simulated(main)


def test_9_what_was_written_since_and_pruned_is_no_later_beginning() -> None:
    """A reader that was to begin at the oldest row begins at a later one of those that there were, and at no other."""

    async def main() -> None:
        async with MemoryDeployment(orders) as shop, shop.bus(writer="w1") as w1:
            last = await write(w1, 1, 2, 3)
            store = open_store(shop.store, Registry([orders]))
            while [one.position for one in await store.known()] != [last]:
                await asyncio.sleep(0.01)
            async with shop.bus(start="earliest") as reader:
                reading = reader.reading
                gate = Gate(reading.store, "fetch")
                reader.subscribe(orders)(lambda _: None)
                await gate.at.wait()
                assert not reading.table._begins_later(PositionTooOld("orders", "w1", 0, last + 1))
                assert reading.table._begins_later(PositionTooOld("orders", "w1", 0, last - 1))
                assert reader.positions() == {"orders": {"w1": last - 1}}
                gate.go_on.set()
                await reader.wait_for(orders, "w1", last)

    simulated(main)


def test_9_12_every_stream_of_a_reader_begins_anew_with_the_log() -> None:
    """Also one that the process which notices it does not follow: whoever does so later is owed all of its rows."""

    async def main() -> None:
        seen = Seen()
        async with MemoryDeployment(orders, payments) as shop, shop.bus(writer="w1") as w1:
            async with shop.bus(reader="r", start="now") as before:
                before.subscribe(orders)(lambda _: None)
                before.subscribe(payments)(lambda _: None)
                await before.wait_for(payments, "w1", await write(w1, 1, stream=payments))
            async with shop.bus(reader="r", start="now") as reader:
                reader.subscribe(orders)(lambda _: None)
                await at_epoch(reader, await set_back(shop, kept(shop)))
                async with shop.bus(writer="w1") as again:
                    last = await write(again, 2, stream=payments)
                reader.subscribe(payments)(seen)
                await reader.wait_for(payments, "w1", last)
                assert seen.numbers == [1, 2]

    simulated(main)


def test_9_rows_pruned_behind_those_in_hand_are_reported() -> None:
    """A reader that was to begin at the oldest row may begin at a later one, as long as nothing was handed out."""

    async def main() -> None:
        async with MemoryDeployment(orders) as shop, shop.bus(writer="w1") as w1:
            last = await write(w1, 1, 2, 3)
            store = open_store(shop.store, Registry([orders]))
            while [one.position for one in await store.known()] != [last]:
                await asyncio.sleep(0.01)
            by_one = attrs.evolve(MEMORY, page_rows=1)
            async with shop.bus(start="earliest", on_too_old="skip", settings=by_one) as reader:
                gate = Gate(reader.reading.store, "fetch", when=lambda question: question.after > 0)
                told: list[Any] = []
                at_work, go_on = asyncio.Event(), asyncio.Event()

                @reader.subscribe(orders)
                async def handle(batch: Any) -> None:
                    told.extend(row.number for row in batch.rows)
                    at_work.set()
                    await go_on.wait()

                reader.on_missed(orders)(lambda _, __, after, upto: told.append((after, upto)))
                await asyncio.gather(gate.at.wait(), at_work.wait())
                assert await store.prune(keep=0) == {("orders", "w1"): last}
                gate.go_on.set()
                await until(lambda: reader.statistics()["reader"]["missed"])
                go_on.set()
                await reader.wait_for(orders, "w1", await write(w1, 4))
                assert told == [1, (1, 3), 4]

    simulated(main)


def test_a_new_log_that_is_set_back_once_more_costs_nobody_what_was_saved_in_that_one() -> None:
    """One process is about to begin anew in a log that is gone already; its twin has, in the next one."""

    async def main() -> None:
        async with MemoryDeployment(orders) as shop, shop.bus(reader="r") as slower, shop.bus(writer="w1") as w1:
            slower.subscribe(orders)(lambda _: None)
            await slower.wait_for(orders, "w1", await write(w1, 1))
            store = open_store(shop.store, Registry([orders]))
            between = await store.restored()
            core = slower.reading.core
            core.new_epoch = between  # proven by a page of that log
            epoch = await store.restored()
            await store.reset_reader("r", {("orders", ""): 0, ("orders", "w1"): 0}, epoch)
            await store.save_reader("r", [("orders", "w1", 0, 1)], epoch)
            await slower.reading.beginning.change_epoch()
            saved = await store.load_reader("r")
            assert (saved.epoch, saved.positions["orders", "w1"]) == (epoch, 1)

    simulated(main)
