from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import InputError
from hocket.planning.critical_path.priorities import TASKS, Priorities

SMALL = st.none() | st.integers(0, 6)


@given(num_paths=st.integers(1, 5), alpha=SMALL, beta=SMALL)
def test_no_gradient_of_a_parameter_comes_before_an_activation_gradient_unless_asked(num_paths, alpha, beta):
    priorities = Priorities(num_paths, alpha, beta)
    ranks = range(num_paths)
    lowest = min(priorities.of("activation", rank) for rank in ranks)
    assert all(priorities.of(task, rank) < lowest for task in ("weight", "bias") for rank in ranks)
    for task in TASKS:
        found = [priorities.of(task, rank) for rank in ranks]
        assert found == sorted(found, reverse=True)


def test_alpha_and_beta_are_taken_by_the_letter_when_asked():
    priorities = Priorities(4, alpha=1, beta=2, above=True)
    assert [priorities.of(task, 0) for task in TASKS] == [4, 3, 2]
    assert priorities.of("weight", 0) > priorities.of("activation", 2)
    assert [Priorities(4, alpha=1, beta=2).of(task, 0) for task in TASKS] == [4, 0, 0]


def test_by_default_bias_gradients_come_last():
    priorities = Priorities(2)
    assert [priorities.of(task, 0) for task in TASKS] == [2, 0, -1]
    assert priorities.of("activation", 7) == 1  # beyond the last rank: the last one's


@pytest.mark.parametrize("alpha", [-1, 1.5, True])
def test_alpha_that_is_no_count_is_refused(alpha):
    with pytest.raises(InputError, match="expected alpha to be a whole number >= 0"):
        Priorities(1, alpha)
