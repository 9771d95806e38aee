"""Every loop of this folder ends scheduled where it ends eagerly, and pure ones are planned.

After 200 steps from the same seed (quick: 110, the last change of any loop comes after 100; bookkeeping: 63) the
scheduled run has, bit by bit, the parameters, buffers, gradients, optimizer state, Python state and random state of the
eager one. It has returned, printed and raised the same, and has called the user's step no more often. On two cores a
plan may run ops at other widths than eager does; there it is within rounding.
"""

from __future__ import annotations

import importlib

import pytest

import hocket
from loops.loop import CASES
from loops.runner import STEPS, builder, compared, problems, run

# Loops with bookkeeping, of which nearly all are planned; they show numbers, which rounding would change.
BOOKKEEPING = ("drawn", "forwards", "kept", "parted", "rates", "refilled", "shown", "trainers")
KINDS = (
    *BOOKKEEPING,
    *("averages", "batches", "between", "branches", "callables", "changes", "counters", "draws", "early_looks"),
    *("history", "late_draws", "methods", "mixed_draws", "optimizers", "selections", "settings", "sinks", "sources"),
    *("texts", "updates"),
)
KIND_OF: dict[str, str] = {}
for kind in KINDS:
    importlib.import_module(f"loops.{kind}")
    KIND_OF |= {name: kind for name in CASES if name not in KIND_OF}

# Together they reach every branch of the library that all loops reached when this was measured; they are quick.
BROAD = {
    *("a_loss_of_zero_to_divide_by", "a_skipped_step_before_a_scheduler", "adversarial"),
    *("adversaries_as_two_steps", "another_branch_later", "another_count_in_every_batch", "average_by_torch"),
    *("batch_in_a_dataclass_that_is_written", "batch_norm_evaluated_between", "best_weights_kept"),
    *("branch_that_changes_once", "confusion_matrix", "counter_in_a_tensor", "counter_whose_type_is_asked"),
    *("csv_rows", "cycle_advanced_inside", "detached_weights_kept_and_given_as_gradients", "dict_kept_elsewhere"),
    *("draws_made_plain", "dropout_made_stronger", "ends_of_objects_are_counted"),
    *("early_result", "engine", "evaluated_every_20", "exponential_average_by_torch_that_is_given"),
    *("generator_of_batches", "hidden_state_in_the_module", "history_of_lists", "imagenet_meters"),
    *("iterator_begun_again", "iterator_that_ends", "list_under_two_names", "logs_by_logging"),
    *("mask_that_selects", "mixed_precision", "noise_on_gradients", "nothing_for_a_batch_now_and_then"),
    *("flag_raised_before_every_other_step", "functions_of_torch_exchanged", "module_imported_in_the_step"),
    *("numbers_of_objects_that_convert", "object_by_a_weak_reference", "words_that_there_are_not_at_first"),
    *("array_that_gets_another_shape", "padding_as_nested_tensors", "switch_of_torchs_python"),
    "words_that_there_are_not_in_many_batches",
    *("numbers_read_before_their_tensors_are_written", "weights_found_by_computed_names"),
    *("order_by_numpy", "partial", "q_learning", "quasi_newton", "raises_before_the_middle"),
    "rates_of_dropout_norms_and_smoothing_that_fall",
    *("several_sinks_in_order", "smoothing_chosen_at_random", "step_of_an_optimizer_that_is_left_out"),
    *("step_that_fails_on_some_batches", "tasks_in_turn", "throughput_by_the_clock"),
    *("transitions_sampled_from_a_memory", "vectors_quantized", "warned_of_as_filters_say"),
}

QUICK_STEPS = 110
FEW_STEPS = 63  # of bookkeeping; the last one does nothing that is done in every so many
MODES = ("default", "plan", "two cores")


def options(mode):
    """Options of a schedule: on one core guarded or not, or unguarded on this machine (two cores or more)."""
    machine = hocket.Machine.here() if mode == "two cores" else hocket.Machine.of(cores=1)
    return {"machine": machine, "guard": mode == "default"}


def runs():
    """Every loop in every mode; quick are `BROAD` and every fifth one, by plan where there has to be one.

    Calls are counted in some of the quick runs, and in all others.
    """
    for mode in MODES:
        for number, (name, case) in enumerate(CASES.items()):
            is_bookkeeping = KIND_OF[name] in BOOKKEEPING
            if is_bookkeeping and mode != "plan":
                continue
            quick = (name in BROAD or number % 5 == 0) and mode == (
                "plan" if case.planned or is_bookkeeping else "default"
            )
            counted = not quick or number % 12 == 0
            yield pytest.param(name, mode, counted, marks=() if quick else pytest.mark.slow, id=f"{name}-{mode}")


@pytest.mark.parametrize(("name", "mode", "counted"), list(runs()))
def test_scheduled_steps_end_where_eager_steps_end(name, mode, counted, tmp_path, request):
    case = CASES[name]
    build = builder(case, tmp_path)
    steps = STEPS if request.node.get_closest_marker("slow") else QUICK_STEPS
    steps = FEW_STEPS if KIND_OF[name] in BOOKKEEPING else steps

    def further(verdict, why):
        if verdict == "eager" and mode != "default" and case.planned:
            yield "the step is pure, and yet there is no plan"
        if verdict == "planned" and KIND_OF[name] in BOOKKEEPING and not case.planned:
            yield "there is a plan"
        if verdict == "eager" and case.word not in why:
            yield f"the reason does not contain {case.word!r}"

    compared(build, options(mode), steps=steps, counted=counted, exact=mode != "two cores", further=further)


def test_nearly_all_are_planned():
    cases = [case for name, case in CASES.items() if KIND_OF[name] in BOOKKEEPING]
    assert len(cases) >= 70
    assert sum(not case.planned for case in cases) <= len(cases) // 20


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_eager_steps_repeat(name, tmp_path):
    """Without this, a difference would say nothing."""
    build = builder(CASES[name], tmp_path)
    assert not problems(run(build), run(build))
