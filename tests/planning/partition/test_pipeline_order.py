import pytest

from hocket.errors import InputError
from hocket.planning.partition.pipeline_order import PipelineAction, PipelineOrder, pipeline_step_us, rank_memory_bytes


def one_rank_each(*texts: str, micro_batches: int = 2) -> PipelineOrder:
    ranks = [
        tuple(PipelineAction(stage, word[0], int(word[1:])) for word in text.split())
        for stage, text in enumerate(texts)
    ]
    return PipelineOrder("made", tuple(ranks), len(texts), micro_batches)


ORDER = one_rank_each("F0 F1 B0 B1", "F0 B0 F1 B1")


def test_a_step_waits_for_what_crosses():
    # Rank 1: F0 2..4, B0 4..8, F1 8..10, B1 10..14; rank 0 has the last gradient at 15.
    assert pipeline_step_us(ORDER, [1.0, 2.0], [2.0, 4.0], [0.0, 1.0]) == 17.0
    assert pipeline_step_us(ORDER, [1.0, 2.0], [2.0, 4.0], [9.0, 0.0]) == 15.0


def test_a_transfer_takes_the_readers_time_where_it_does_not_receive_ahead():
    late = PipelineOrder("made", ORDER.ranks, 2, 2, receives_ahead=False)
    # Rank 1: F0 arrives at 2, B0 ends at 8, F1 arrives at 9, B1 ends at 15; rank 0: a gradient and its backward.
    assert pipeline_step_us(late, [1.0, 2.0], [2.0, 4.0], [0.0, 1.0]) == 18.0


def test_halves_of_a_backward_fill_what_is_idle():
    halves = one_rank_each("F0 F1 I0 W0 I1 W1", "F0 I0 F1 I1 W0 W1")
    assert pipeline_step_us(halves, [1.0, 2.0], [2.0, 4.0], [0.0, 0.0]) == 13.0
    assert halves.in_flight == (2, 2)


def test_between_stages_of_one_rank_nothing_crosses():
    actions = [PipelineAction(*each) for each in ((0, "F", 0), (1, "F", 0), (1, "B", 0), (0, "B", 0))]
    order = PipelineOrder("made", (tuple(actions),), 2, 1)
    assert order.rank_of == (0, 0)
    assert pipeline_step_us(order, [1.0, 1.0], [2.0, 2.0], [0.0, 100.0]) == 6.0


def test_memory_is_what_a_rank_holds_at_once():
    assert ORDER.in_flight == (2, 1)
    assert rank_memory_bytes(ORDER, [10.0, 20.0], [3.0, 5.0]) == (16.0, 25.0)


def test_orders_that_cannot_be():
    with pytest.raises(InputError, match="stage 1 is on ranks \\[\\], expected one rank"):
        PipelineOrder("made", ((PipelineAction(0, "F", 0),),), 2, 1)
    backward_first = one_rank_each("B0 F0", "F0 B0", micro_batches=1)
    with pytest.raises(InputError, match=r"schedule made: .* wait for each other"):
        pipeline_step_us(backward_first, [1.0, 1.0], [1.0, 1.0], [0.0, 0.0])
