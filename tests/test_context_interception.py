"""Attention in the body of a `context_parallel` is context parallel whichever way it is called, or refused by name."""

import contextlib
import functools
import gc
import itertools
import weakref

import pytest
import torch
import torch._dynamo.testing
import torch._functorch.config
import torch._inductor.config
from contexts import WAYS, WITH_ODD_FORWARDS, Recomputed, Subject, compiling, in_thread, no_traces, one_rank_mesh
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import ringcp
from ringcp.testing import assert_close

COMPILED = ("eager", "before", "inside")
CHECKPOINTS = {"none": None, "not reentrant": False, "reentrant": True}
BACKWARD = ("inside", "outside")
THREADS = ("main", "other")
TABLE = list(itertools.product(WAYS, COMPILED, CHECKPOINTS, BACKWARD, THREADS))
MHA_REFUSED = "nn.MultiheadAttention: expected it outside of compiled code inside context_parallel"


def checkpointed(fn, use_reentrant):
    return fn if use_reentrant is None else functools.partial(checkpoint, fn, use_reentrant=use_reentrant)


def step_of(subject, compiled, checkpointing, *, checkpoint_first=False, **options):
    """The model as the first three columns say; "before" has run once outside."""
    torch._dynamo.reset()
    step, use_reentrant = subject.model, CHECKPOINTS[checkpointing]
    if checkpoint_first:
        step = checkpointed(step, use_reentrant)
    if compiled != "eager":
        step = torch.compile(step, **options)
    if compiled == "before":
        subject.train_plain(step)
    return step if checkpoint_first else checkpointed(step, use_reentrant)


def one_cell(subject, step, backward, thread):
    """One training step in a context: "right", or what was raised. Other threads only enter and leave the context."""

    def body():
        with subject.context():
            out = step(*subject.inputs)
            if backward == "inside":
                subject.backward(out)
        return out

    try:
        out = in_thread(body) if thread == "other" else body()
        if backward == "outside":
            subject.backward(out)
        subject.check(out)
        if thread == "other":
            subject.train_plain(step)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "right"


@compiling
def walk(mesh, table, seq_len, options):
    """The cells that are not right, and why. Cells that differ in backward and thread share what is compiled."""
    subjects = {way: Subject(mesh, way, seq_len=seq_len, mask=ringcp.Causal()) for way in WAYS}
    found, steps = {}, {}
    for way, compiled, checkpointing, *rest in table:
        key = way, compiled, checkpointing
        if key not in steps:
            steps = {key: step_of(subjects[way], compiled, checkpointing, **options)}
        found[*key, *rest] = one_cell(subjects[way], steps[key], *rest)
    assert len(found) == len(table)
    return {cell: said for cell, said in found.items() if said != "right"}


@pytest.mark.report("7.1")
@pytest.mark.report("7.4")
@pytest.mark.report("7.24")
def test_every_cell_is_right_or_refused_by_name(worlds):
    assert len(TABLE) == 108
    for wrong in worlds(2).run(walk, TABLE, 13, {"backend": "eager", "fullgraph": True}):
        assert wrong.keys() == {cell for cell in TABLE if cell[0] == "MHA" and cell[1] != "eager"}, wrong
        for said in wrong.values():
            assert said.startswith("Unsupported: ")  # Dynamo's, with ours in it
            assert MHA_REFUSED in said


PARTS = {
    "MHA breaks the graph": (
        2,
        lambda way, compiled, _, __, thread: way == "MHA" and compiled != "eager" and thread == "main",
        {},
    ),
    "three ranks": (
        3,
        lambda _, compiled, checkpointing, __, thread: (
            compiled == "before" and checkpointing != "not reentrant" and thread == "main"
        ),
        {},
    ),
    "with aot": (
        2,
        lambda way, compiled, *_: way == "name" and compiled == "before",
        {"backend": "aot_eager", "fullgraph": True},
    ),
    "checkpoint inside compiled code": (
        2,
        lambda way, compiled, checkpointing, _, thread: (
            way != "F" and compiled == "inside" and checkpointing != "none" and thread == "main"
        ),
        {"backend": "aot_eager", "checkpoint_first": True},
    ),
}


@pytest.mark.report("7.6")
@pytest.mark.parametrize("part", PARTS)
def test_parts_of_the_table(worlds, part):
    size, chosen, options = PARTS[part]
    table = [cell for cell in TABLE if chosen(*cell)]
    assert table
    assert worlds(size).run(walk, table, 11, {"backend": "eager", **options}) == [{}] * size


MASKS = [None, ringcp.Causal(), ringcp.Window(3), ringcp.Window(5, 2), None, ringcp.Causal()]


@compiling
def compile_for_many_masks(mesh):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    subjects = [Subject(mesh, mask=mask) for mask in MASKS]
    # Modules of one's own would be guarded each.
    compiled = torch.compile(subjects[0].model, fullgraph=True, backend=counter)
    frames = []
    for subject in subjects:
        subject.use(subjects[0].model)
        subject.train(compiled)
        frames.append(counter.frame_count)
    subject.train_plain(compiled)
    frames.append(counter.frame_count)
    subject.train(compiled)
    subject.train_plain(compiled)
    return frames, counter.frame_count


def test_masks_do_not_recompile(worlds):
    for frames, in_the_end in worlds(2).run(compile_for_many_masks):
        assert frames[0] >= 1
        assert frames[5] <= frames[0] + 2
        assert in_the_end == frames[6] <= frames[5] + 1  # plain attention is one more


@compiling
def two_meshes(mesh):
    """One compiled function, on the whole mesh and on meshes of one rank each."""
    whole = Subject(mesh, mask=ringcp.Causal())
    alone = Subject(one_rank_mesh(mesh), mask=ringcp.Window(4), layout=ringcp.Striped)
    alone.use(whole.model)
    compiled = torch.compile(whole.model, fullgraph=True, backend="aot_eager")
    for subject in (whole, alone, whole, alone):
        subject.train(compiled)
        subject.train(compiled, inside=False)


def test_a_compiled_function_on_two_meshes(worlds):
    worlds(3).run(two_meshes)


@compiling
def by_inductor(mesh):
    subject = Subject(mesh, mask=ringcp.Causal())
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        subject.train(torch.compile(subject.model, fullgraph=True), inside=False)


def test_inductor(worlds):
    worlds(2).run(by_inductor)


@compiling
def beside(mesh):
    """A thread that is not in the context, while the main thread is."""
    subject, other = Subject(mesh, mask=ringcp.Causal()), Subject(mesh, "MHA")
    compiled = torch.compile(subject.model, backend="eager", fullgraph=True)
    with subject.context():
        out = compiled(*subject.inputs)
        for fn in (subject.model, compiled, checkpointed(compiled, True), checkpointed(subject.model, False)):
            in_thread(lambda fn=fn: subject.train_plain(fn))
        in_thread(lambda: other.train_plain(other.model))
        assert in_thread(ringcp.current_context) is None
        subject.backward(out)
    subject.check(out)


@pytest.mark.report("7.29")
def test_other_threads_have_plain_attention(worlds):
    worlds(2).run(beside)


@compiling
def generators(mesh):
    """Contexts that overlap without being nested. Compiled code sees the function modes alone."""
    subjects = [Subject(mesh, mask=mask, seq_len=n) for mask, n in ((None, 9), (ringcp.Causal(), 10))]
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True, dynamic=False)

    def body(subject):
        with subject.context() as context:
            while True:
                assert ringcp.current_context() is context
                out = subject.model(*subject.inputs)
                subject.backward(out)
                subject.check(out)
                q, k, v = (x.detach() for x in subject.inputs)
                both = [fn(q, k, v, enable_gqa=True) for fn in (compiled, scaled_dot_product_attention)]
                assert torch.equal(*both)
                yield

    next(body(subjects[0]))  # the first context of a process leaves a kernel, for good
    with no_traces():
        first, second = map(body, subjects)
        next(first)
        next(second)
        first.close()
        next(second)
        second.close()
    with no_traces():
        first, second = map(body, subjects)
        next(first)
        next(second)
        del first
        next(second)
        del second
        gc.collect()
    subjects[0].train_plain(subjects[0].model)


def test_generators_leave_in_any_order(worlds):
    worlds(2).run(generators)


@compiling
def methods_of_tensors(mesh):
    """Those that are written in Python, under the function mode of a context."""

    def attend(x):
        q, k, v = x.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).split(4, -1)

    x = torch.randn(2, 5, 24, dtype=torch.float64)
    with ringcp.context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        found = torch.compile(attend, backend="eager", fullgraph=True)(x)
        for part, expected in zip(found, attend(x), strict=True):
            assert_close(part, expected)


def test_methods_of_tensors_compile_in_a_context(worlds):
    worlds(1).run(methods_of_tensors)


@compiling
def nested(mesh):
    outer = Subject(mesh, mask=ringcp.Causal())
    inner = Subject(one_rank_mesh(mesh), mask=ringcp.Window(2), seq_len=9)
    other_mask = Subject(mesh, "MHA", mask=ringcp.Window(3), seq_len=15, layout=ringcp.Contiguous)
    for step in (outer.model, torch.compile(outer.model, backend="eager", fullgraph=True)):
        with no_traces():
            with outer.context() as context:
                inner.train(inner.model)
                assert ringcp.current_context() is context
                out = step(*outer.inputs)
                with inner.context():
                    within = inner.model(*inner.inputs)
                    other_mask.train(other_mask.model)
                    inner.backward(within)
                    inner.check(within)
                    outer.backward(out)  # its own context is the outer one
                    outer.check(out)
                again = step(*outer.inputs)
            outer.backward(again)
            outer.check(again)


@pytest.mark.report("7.7")
def test_the_inner_context_gives_back_the_outer(worlds):
    worlds(2).run(nested)


def errors(mesh):
    subject, other = Subject(mesh, mask=ringcp.Causal()), Subject(mesh, seq_len=8)
    buffer = torch.arange(13)
    bad_entries = [
        (ringcp.UnsupportedError, {"mode": "spiral"}),
        (ringcp.LayoutError, {"buffers": [buffer, torch.arange(12)], "buffer_seq_dims": [0, 0]}),
        (ringcp.AgreementError, {"mask": [ringcp.Causal(), None][mesh.get_local_rank()]}),
    ]

    def enter_badly():
        for error, options in bad_entries:
            with pytest.raises(error), subject.context(**options):
                raise AssertionError("entered")

    def raise_in_the_body():
        with (
            contextlib.suppress(ZeroDivisionError),
            subject.context(buffers=[buffer], buffer_seq_dims=[0]),
        ):
            subject.model(*subject.inputs)
            assert 1 / 0, f"{len(buffer)} of 13"
        assert len(buffer) == 13

    with no_traces():
        enter_badly()
        raise_in_the_body()
        with other.context() as context:
            enter_badly()
            raise_in_the_body()
            assert ringcp.current_context() is context
            out = other.model(*other.inputs)
        other.backward(out)
        other.check(out)
    assert torch.equal(buffer, torch.arange(13))


@pytest.mark.report("7.8")
def test_errors_in_the_body_and_on_entry_restore_everything(worlds):
    worlds(2).run(errors)


def two_models(mesh):
    """One context for models with other heads, other head dims, and another way into attention."""
    subjects = [Subject(mesh, way, mask=ringcp.Causal()) for way in ("F", "MHA", "name")]
    with subjects[0].context():
        outs = [subject.model(*subject.inputs) for subject in subjects]
    for subject, out in zip(subjects, outs, strict=True):
        subject.backward(out)
        subject.check(out)


def test_two_models_in_one_context(worlds):
    worlds(2).run(two_models)


def fifty(mesh):
    subject = Subject(mesh, mask=ringcp.Causal())
    leaf, contexts = torch.randn(13, dtype=torch.float64, requires_grad=True), []
    with no_traces():
        for _ in range(50):
            with subject.context(buffers=[leaf], buffer_seq_dims=[0]) as context:
                out = checkpoint(subject.model, *subject.inputs, use_reentrant=False)
                (out.sum() + leaf.sum()).backward()
            contexts.append(weakref.ref(context))
    del context, out
    gc.collect()
    assert [ref() for ref in contexts] == [None] * 50


@pytest.mark.report("7.29")
def test_contexts_leave_nothing_behind(worlds):
    worlds(2).run(fifty)


@compiling
def local_regions(mesh):
    subject, local = Subject(mesh, "MHA", mask=ringcp.Causal()), Subject(mesh, seq_len=9)
    compiled = torch.compile(local.model, backend="eager")

    def region(*x):
        with ringcp.local_attention():
            assert ringcp.current_context() is None
            return local.model(*x)

    def twice(*x):
        with ringcp.local_attention():
            return region(*x)

    def compiled_region(*x):
        with ringcp.local_attention():
            return compiled(*x)

    steps = [region, twice, compiled_region, torch.compile(region, backend="eager")]
    for step, use_reentrant, inside in itertools.product(steps, (None, False, True), (True, False)):
        with subject.context() as context:
            out = checkpointed(step, use_reentrant)(*local.inputs)
            parallel = checkpointed(subject.model, use_reentrant)(*subject.inputs)
            assert ringcp.current_context() is context
            if inside:
                local.backward(out)
                subject.backward(parallel)
        if not inside:
            local.backward(out)
            subject.backward(parallel)
        local.check_plain(out)
        subject.check(parallel)
    with ringcp.local_attention():  # outside of a context it does nothing
        local.train_plain(local.model)
        subject.train(subject.model)  # and a context in it counts


@pytest.mark.report("7.25")
@pytest.mark.report("1.I5")
def test_local_attention(worlds):
    worlds(2).run(local_regions)


def region_around_checkpoint(mesh):
    """The region is around the checkpoint, not in it: the recomputation is as local."""
    subject = Subject(mesh, mask=ringcp.Causal())
    for way, use_reentrant, inside in itertools.product(("name", "MHA"), (False, True), (True, False)):
        local = Subject(mesh, way, seq_len=9)
        with subject.context():
            with ringcp.local_attention():
                out = checkpoint(local.model, *local.inputs, use_reentrant=use_reentrant)
            if inside:
                local.backward(out)
        if not inside:
            local.backward(out)
        local.check_plain(out)
        with no_traces(), subject.context():
            pass


def test_recomputation_stays_local(worlds):
    worlds(2).run(region_around_checkpoint)


def checkpoints_of_outside(mesh):
    """Forward outside of any context, backward inside one: plain attention, or refused."""
    said = {}
    for way, use_reentrant in itertools.product(("name", "MHA"), (False, True)):
        subject = Subject(mesh, way)
        out = checkpoint(subject.model, *subject.inputs, use_reentrant=use_reentrant)
        try:
            with subject.context():
                subject.backward(out)
        except ringcp.UnsupportedError as error:
            said[way, use_reentrant] = str(error)
        else:
            subject.check_plain(out)
            said[way, use_reentrant] = "right"
    return said


def test_a_checkpoint_of_outside(worlds):
    for said in worlds(2).run(checkpoints_of_outside):
        assert len(said) == 4
        for text in said.values():
            assert text == "right" or text.startswith("backward: expected attention inside context_parallel"), said


@compiling
def foreign_checkpoints(mesh, way):
    subject = Subject(mesh, way, mask=ringcp.Causal())
    step = functools.partial(Recomputed.apply, subject.model)
    subject.train_plain(step)
    subject.train(step)
    subject.train_plain(step)
    with pytest.raises(ringcp.UnsupportedError, match=r"^Recomputed: expected backward inside the context_parallel"):
        subject.train(step, inside=False)
    subject.train(step)
    compiled = torch.compile(subject.model, backend="eager")
    step = functools.partial(Recomputed.apply, compiled)
    with pytest.raises(ringcp.UnsupportedError, match=r"^Recomputed: expected no compiled code that attends"):
        subject.train(step)
    subject.train_plain(step)


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_of_another_library(worlds, way):
    worlds(2).run(foreign_checkpoints, way)


@compiling
def odd_checkpoints(mesh, function):
    """Right or refused, never local in silence."""
    for way, compiled, inside in itertools.product(("name", "MHA"), (False, True), (True, False)):
        torch._dynamo.reset()
        subject = Subject(mesh, way, mask=ringcp.Causal())
        fn = torch.compile(subject.model, backend="eager") if compiled else subject.model
        step = functools.partial(function.apply, fn)
        subject.train_plain(step)
        with contextlib.suppress(ringcp.UnsupportedError):
            subject.train(step, inside=inside)
        subject.train_plain(step)


@pytest.mark.parametrize("function", WITH_ODD_FORWARDS)
def test_odd_checkpoints_of_other_libraries(worlds, function):
    worlds(2).run(odd_checkpoints, function)


def across_contexts(mesh):
    """Backward in another context than forward, or in a local region, and twice; checkpoints in checkpoints."""
    other = Subject(mesh, mask=ringcp.Window(2), seq_len=10, layout=ringcp.Striped)
    for way, use_reentrant in itertools.product(("name", "MHA"), (None, False, True)):
        subject = Subject(mesh, way, mask=ringcp.Causal())
        step = checkpointed(subject.model, use_reentrant)
        if use_reentrant is not None:
            step = checkpointed(checkpointed(step, True), False)
        with subject.context():
            out, again = step(*subject.inputs), step(*subject.inputs)
            with ringcp.local_attention():
                subject.backward(out)
            subject.check(out)
        with other.context() as context:
            subject.backward(again)
            subject.check(again)
            assert ringcp.current_context() is context
            other_out = other.model(*other.inputs)
            other.backward(other_out)
        other.check(other_out)


@pytest.mark.report("7.6")
def test_backward_in_another_context(worlds):
    worlds(2).run(across_contexts)
