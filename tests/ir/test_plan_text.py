import pytest
from hypothesis import given

from hocket.errors import FormatError
from hocket.ir import Lane, Plan
from strategies import any_plans
from support.refusals import fails


@given(plan=any_plans())
def test_round_trip(plan):
    assert Plan.parse(str(plan)) == plan


def test_the_text_says_what_it_means():
    plan = Plan(
        (
            Lane("cpu0.0", ("conv1", "relu1"), cores=(0,)),
            Lane("gpu", ("grad",), kind="stream", device="gpu0", priority=2),
            Lane("net", ("recv",), kind="channel", device="server0->worker0"),
        ),
        {"grad": ("relu1", "recv")},
        "list",
    )
    text = (
        "hocket-plan/1 planner=list\n"
        "lane cpu0.0 kind=cores device=cpu0 width=1 cores=0\n"
        "run conv1\n"
        "run relu1\n"
        "lane gpu kind=stream device=gpu0 priority=2\n"
        "run grad after=relu1,recv\n"
        "lane net kind=channel device=server0->worker0\n"
        "run recv\n"
    )
    assert str(plan) == text
    assert Plan.parse(f"# made by hand\n\n{text}") == plan


HEAD = "hocket-plan/1\n"
PROBLEMS = {
    "mine.plan: empty; expected a first line 'hocket-plan/1'": "",
    "mine.plan: line 1: expected 'hocket-plan/1', got 'hocket-plan/2'": "hocket-plan/2\n",
    "mine.plan: line 2: op 'a' stands before the first lane": f"{HEAD}run a\n",
    "mine.plan: line 2: expected 'lane NAME ...' or 'run OP', got 'lame x'": f"{HEAD}lame x\n",
    "mine.plan: line 3: expected after=..., got 'afer=b'": f"{HEAD}lane x\nrun a afer=b\n",
    "mine.plan: line 2: expected kind=... device=...": f"{HEAD}lane x colour=red\n",
    "mine.plan: line 2: lane 'x': invalid literal": f"{HEAD}lane x width=two\n",
    "op 'a' is run twice: on lane 'x' and on 'y'": f"{HEAD}lane x\nrun a\nlane y\nrun a\n",
    "duplicate lane name 'x'": f"{HEAD}lane x\nlane x\n",
    "lane 'x': unknown kind 'fibre'": f"{HEAD}lane x kind=fibre\n",
    "lane 'x': expected a width of at least 1, got 0": f"{HEAD}lane x width=0\n",
    "lane 'x': only a lane of cores has a width and cores": f"{HEAD}lane x kind=stream width=2\n",
    "lane 'x': expected device=SRC->DST, got 'server0'": f"{HEAD}lane x kind=channel device=server0\n",
    "lane 'x': expected different cores counted from 0, got (1, 1)": f"{HEAD}lane x cores=1,1\n",
    "after['a']: names an op that no lane runs: 'b'": f"{HEAD}lane x\nrun a after=b\n",
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_bad_line_is_named(problem):
    with pytest.raises(FormatError) as caught:
        Plan.parse(PROBLEMS[problem], source="mine.plan")
    assert str(caught.value).startswith("mine.plan: ")
    assert problem in str(caught.value)


def test_a_name_with_white_space_does_not_become_two():
    fails(FormatError, "'a b'", Plan, (Lane("x", ("a b",)),))
    fails(FormatError, "'my planner'", Plan, (Lane("x"),), planner="my planner")
    fails(FormatError, "comma: 'a,b'", Plan, (Lane("x", ("a,b", "c")),), {"c": ("a,b",)})


def test_lane_of_and_length():
    plan = Plan((Lane("x", ("a", "b")), Lane("y", ("c",))))
    assert len(plan) == 3
    assert plan.lane_of["c"].name == "y"
