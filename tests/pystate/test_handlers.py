"""Tests of the statements that may catch what is raised within them."""

import contextlib
import sys
import threading

import pytest
import torch

from hocket.pystate.handlers import may_catch


class Swallowing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return True


def same(value):
    return value


ONE, LOCK, PLAIN = Swallowing(), threading.Lock(), contextlib.nullcontext()


def asked():
    return may_catch(sys._getframe(1), sys._getframe(2))


def in_a_try():
    try:
        return asked()
    except ValueError:
        return None


def in_a_bare_try():
    try:
        return asked()
    except:  # noqa: E722
        return None


def in_a_finally_within_a_try():
    try:
        try:
            return asked()
        finally:
            same(1)
    except KeyError:
        return None


def in_a_with():
    with ONE:
        return asked()


def in_the_second_of_a_with():
    with torch.no_grad(), contextlib.suppress(ValueError):
        return asked()


def in_an_outer_with():
    with ONE, torch.no_grad(), LOCK:
        return asked()


def in_a_with_of_either():
    with torch.no_grad() if LOCK else ONE:
        return asked()


def in_a_with_of_a_result():
    with same(torch.no_grad()):
        return asked()


def in_a_finally():
    try:
        return asked()
    finally:
        same(1)


def in_a_handler():
    try:
        raise KeyError
    except KeyError:
        return asked()


def in_an_else():
    try:
        same(1)
    except KeyError:
        return None
    else:
        return asked()


def in_a_with_of_torch():
    with torch.autocast("cpu", dtype=torch.bfloat16), LOCK, PLAIN:
        return asked()


def in_a_comprehension():
    return sum([asked() for _ in range(2)])


CATCH = [
    *(in_a_try, in_a_bare_try, in_a_finally_within_a_try, in_a_with, in_the_second_of_a_with),
    *(in_an_outer_with, in_a_with_of_either, in_a_with_of_a_result),
]


@pytest.mark.parametrize("function", CATCH)
def test_it_may_be_caught(function):
    assert function()


@pytest.mark.parametrize("function", [in_a_finally, in_a_handler, in_an_else, in_a_with_of_torch, in_a_comprehension])
def test_it_is_not_caught(function):
    assert not function()
