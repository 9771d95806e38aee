"""Use of the CPUs of a process, by itself and by other programs."""

import os
import sys

import pytest

from hocket.adaptation import cpu_use
from hocket.adaptation.cpu_use import CpuUse, cpu_ticks

cores_of_others = CpuUse.cores_of_others  # which tests do without (`conftest.alone`)
BEFORE = "cpu  9 0 0 9 0 0 0 0 0 0\ncpu0 100 0 20 300 40 0 5 0 7 0\ncpu1 1 0 1 90 0 0 0 0 0 0\nintr 5\n"


def test_ticks_are_those_of_the_cpus_asked_for(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text(BEFORE)
    assert cpu_ticks([0], stat) == (125, 465)
    assert cpu_ticks([0, 1], stat) == (127, 557)
    assert cpu_ticks([7], stat) is None
    stat.write_text("cpu0 1 2\n")
    assert cpu_ticks([0], stat) is None
    assert cpu_ticks([0], tmp_path / "nothing") is None


def test_the_share_is_of_what_has_passed(tmp_path, monkeypatch):
    told = iter([(125, 465), (200, 565), (200, 565), None])
    monkeypatch.setattr(cpu_use, "cpu_ticks", lambda cpus: next(told))
    use = CpuUse()
    assert use.since_last() == 0.75
    assert use.since_last() is None  # no time has passed
    assert use.since_last() is None  # the system says nothing


def test_what_this_process_used_itself_is_not_of_others(monkeypatch):
    hertz, cpus = 100, 2
    monkeypatch.setattr(os, "sysconf", lambda name: hertz)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cpus))
    # A second of two CPUs, of which one and a half were busy.
    ticks = iter([(0, 0), (150, 200), (150, 200), (150, 204)])
    monkeypatch.setattr(cpu_use, "cpu_ticks", lambda cpus: next(ticks))
    own_s = iter([0.0, 1.2, 1.2, 1.2])
    monkeypatch.setattr(cpu_use, "process_time", lambda: next(own_s))
    use = CpuUse()
    assert cores_of_others(use) == pytest.approx(0.3)
    assert cores_of_others(CpuUse()) == 0.0  # nothing is known of two ticks


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_this_system_says_it():
    busy, whole = cpu_ticks([0])
    assert 0 <= busy <= whole
