"""`set_rotate_method`: torch's words, what they mean, where they hold and how they are taken back."""

import contextvars
import inspect
import threading

import pytest
from torch.distributed.tensor.experimental import _attention as torchs

import ringcp
from ringcp.rotate import rotate_mode


@pytest.fixture(autouse=True)
def taken_back():
    yield
    ringcp.set_rotate_method(None)


def test_unset_it_says_nothing():
    assert contextvars.Context().run(rotate_mode) is None


@pytest.mark.parametrize(("word", "mode"), [("allgather", "gather"), ("alltoall", "ring")])
def test_torchs_words(word, mode):
    torchs.set_rotate_method(word)  # torch knows the word too
    assert ringcp.set_rotate_method(word) is None
    assert rotate_mode() == mode
    ringcp.set_rotate_method(None)
    assert rotate_mode() is None


def test_the_argument_has_torchs_name():
    assert list(inspect.signature(ringcp.set_rotate_method).parameters) == list(
        inspect.signature(torchs.set_rotate_method).parameters
    )


@pytest.mark.parametrize(
    "word", ["ring", "all_gather", "ALLGATHER", "", 1, torchs._RotateMethod.ALL_GATHER, ["alltoall"]]
)
def test_other_words_are_refused_and_change_nothing(word):
    ringcp.set_rotate_method("alltoall")
    with pytest.raises(
        ringcp.UnsupportedError, match=r"^rotate_method: expected 'allgather', 'alltoall' or None, got .+; .+"
    ):
        ringcp.set_rotate_method(word)
    assert rotate_mode() == "ring"


def test_it_holds_in_its_own_context_only():
    ringcp.set_rotate_method("alltoall")
    contextvars.copy_context().run(ringcp.set_rotate_method, "allgather")
    assert rotate_mode() == "ring"
    seen = []
    threads = [
        threading.Thread(target=lambda: contextvars.Context().run(lambda: seen.append(rotate_mode()))),
        threading.Thread(target=contextvars.copy_context().run, args=(lambda: seen.append(rotate_mode()),)),
    ]
    for thread in threads:
        thread.start()
        thread.join()
    assert seen == [None, "ring"]
