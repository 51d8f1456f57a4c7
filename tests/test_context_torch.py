"""What the README says of torch's own `context_parallel` is so: each row of its table, on torch's function."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention as imported

from ringcp.testing import world

pytestmark = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the table is of torch 2.13")


def torchs(*args, **kwargs):
    from torch.distributed.tensor.experimental import context_parallel

    return context_parallel(*args, **kwargs)


def tensors(seq_len=16, **options):
    return [torch.randn(1, 2, seq_len, 8, generator=torch.Generator().manual_seed(i), **options) for i in range(3)]


def leaf(mesh):
    q, *_ = tensors(requires_grad=True)
    with torchs(mesh, buffers=[q], buffer_seq_dims=[2]):
        pass


def no_buffers(mesh):
    with torchs(mesh):
        pass


def cpu(mesh):
    qkv = tensors()
    with torchs(mesh, buffers=qkv, buffer_seq_dims=[2] * 3):
        F.scaled_dot_product_attention(*qkv, is_causal=True)


@pytest.mark.parametrize(
    ("program", "error"),
    [
        pytest.param(leaf, "RuntimeError", marks=pytest.mark.report("7.3")),
        pytest.param(no_buffers, "IndexError", marks=pytest.mark.report("7.9")),
        pytest.param(cpu, "RuntimeError|NotImplementedError", marks=pytest.mark.report("7.1")),
    ],
)
def test_it_raises(own_world, program, error):
    with pytest.raises(Exception, match=error):
        own_world.run(program)


def by_name(mesh):
    """The largest difference from attention over the rank's own rows."""
    qkv = tensors()
    with torchs(mesh, buffers=qkv, buffer_seq_dims=[2] * 3):
        q, k, v = qkv
        return (imported(q, k, v) - torch.softmax(q @ k.mT / 8**0.5, -1) @ v).abs().max().item()


def overlapping(mesh):
    """Whether the base of two overlapping buffers is what it was."""
    base = torch.arange(17).repeat(2, 1)
    before = base.clone()
    with torchs(mesh, buffers=[base[:, :-1], base[:, 1:]], buffer_seq_dims=[1, 1]):
        pass
    return torch.equal(base, before)


def odd(mesh):
    """Which positions a rank gets of a length that 2 x ranks does not divide."""
    positions = torch.arange(10)
    with torchs(mesh, buffers=[positions], buffer_seq_dims=[0]):
        return positions.tolist()


@pytest.mark.report("7.24")
def test_a_name_is_local_in_silence(own_world):
    assert max(own_world.run(by_name)) < 1e-5


@pytest.mark.report("7.16")
def test_overlapping_buffers_are_overwritten(own_world):
    assert own_world.run(overlapping) == [False, False]


@pytest.mark.report("7.12")
def test_an_odd_length_is_not_balanced(own_world):
    assert own_world.run(odd) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


@pytest.fixture
def own_world():
    """A pool of its own, since torch's function leaves its state behind."""
    with world(2) as pool:
        yield pool
