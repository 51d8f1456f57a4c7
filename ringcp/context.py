"""`ringcp.context_parallel`: attention in its body is context parallel, with buffers sharded in place."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringcp.active import Session, active_session, is_active, sessions
from ringcp.agreement import slopes_text
from ringcp.ambient import context_around, layout_around
from ringcp.checks import check_agree, check_layout, check_mode, check_save
from ringcp.context_buffers import (
    Given,
    check_no_documents,
    checked_buffers,
    layout_of,
    listed,
    numbers_text,
    sized,
)
from ringcp.errors import ArgumentError, RingcpError
from ringcp.groups import GroupState, group_of, state_of
from ringcp.inplace import Buffer, sharded_in_place
from ringcp.interception import intercepted
from ringcp.kernels.registry import check_kernel_name
from ringcp.layout import Layout
from ringcp.mask import Mask
from ringcp.options import Options, degree_in, options_problem, seconds_of
from ringcp.rotate import rotate_mode
from ringcp.saving import saving_shards
from ringcp.sdpa import Context, make_context
from ringcp.sharding import layout_left, unshard, vote
from ringcp.untraced import callers_level, eager, untraced


@untraced
@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[Tensor] | None = None,
    mode: str = "auto",
    layout: Layout | str = "auto",
    mask: Mask | None = None,
    kernel: str = "auto",
    ulysses_degree: int | None = None,
    gather_memory: int | None = None,
    save: str = "auto",
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    agree: str | None = None,
    timeout: float | timedelta | None = None,
) -> Iterator[Context]:
    """Split one long sequence over the ranks of `mesh` for the body.

    `F.scaled_dot_product_attention` in the body attends over the whole sequence: called by any name, from
    `nn.MultiheadAttention` (eager, ``need_weights=False``), in compiled code, and where `torch.utils.checkpoint`
    recomputes, also in a backward pass after the body. Other ways into attention raise (but for TorchScript of
    `nn.MultiheadAttention` in ``eval()``, a fast path that no hook reaches); `local_attention` leaves a
    region alone. It holds for the thread that enters it. Contexts nest, and the innermost counts. One without buffers
    gives some layers a narrower mask, or other options, on the shards of the one around it on the same mesh, from which
    it takes what it leaves out.
    In eager code each call of a torch function costs about 2 us more (CPU), since it is looked at; and from the first
    context on, the eager `F.scaled_dot_product_attention` of the process about 10 us, since its kernel asks whether it
    is in one.

    The buffers hold the whole sequence, the same on every rank (never ``x.chunk(n)[rank]``): on entry the ranks compare
    a hash of the integers in them, for which they wait for a GPU. In the body buffers are this rank's shards, and after
    it they are whole again, even if it raised. Their gradients are those of the sum over ranks of each rank's loss, and
    after the body a leaf's ``.grad`` has the leaf's full shape, whole on every rank, added to what was there: backward
    runs in the body or after it. In the body, ``.grad`` is this rank's rows; `torch.autograd.grad` and
    ``backward(inputs=...)`` reach a leaf there only. A ``.grad`` from before is taken to be the same on every rank.
    Writes to a buffer in the body are dropped, as the shard is a copy; an optimizer that steps a leaf there raises.
    Parameters of DDP or FSDP are no buffers, and DDP needs ``broadcast_buffers=False`` if buffers of its module are.

    Args:
        mesh: a 1-D `DeviceMesh`, such as ``mesh["cp"]`` of a larger one, or a 2-D one, ``mesh["cp", "sp"]``.
        buffers: tensors whose rows belong to tokens: ids, labels, positions, rope tables, masks of the loss. Any dtype
            and strides, overlapping views too. A tensor that is computed from one that needs a gradient is no buffer:
            use `ringcp.shard`. With a `Joint` layout, as long as it (replicated tokens first) or as its `rest`.
        buffer_seq_dims: the sequence dim of each buffer; negative ones count from the end.
        no_restore_buffers: those of `buffers` that remain shards after the body.
        mode, ulysses_degree, gather_memory, save: as in `ringcp.attention`; the mode "auto" is first what
            `set_rotate_method` says.
        layout: which rank owns which tokens: a `Layout` or a name. "auto" is what `make_layout` makes of `mask` if
            there are a mask and buffers to say how long the sequence is; without buffers, that of the context around
            this one on the same mesh; otherwise head-tail.
        mask: which positions attend to which, in every call of the body; ``is_causal=True`` is intersected with it.
            Say here all that the calls leave out, so that the work is balanced by it: ``Documents(...) & Causal()``.
            None: as each call says; it is refused if a buffer looks like the position ids of packed documents. An
            ``attn_mask`` of a call, bool or added to the scores, holds beside it. Its last two dims are (1, this rank's
            keys), as of a padding mask that is a buffer, or (this rank's rows or 1, all keys in their order); others
            raise, but for a rank alone. A row that sees no key, or only numbers beside which no score shows
            (``torch.finfo(dtype).min``), is 0. Such a call always votes; kernels: "sdpa_flash_cpu", on a GPU
            "sdpa_efficient", and "reference".
        softcap, alibi_slopes: as in `ringcp.attention`, in every call of the body.
        kernel: as in `ringcp.attention`. A call with ``dropout_p`` above 0 raises unless it is "reference", the one
            kernel with dropout; which weights a call drops depends on the seed and not on the number of ranks.
        agree: "call" (default on CPU): the ranks vote before every attention call, or "context" (default on CUDA): once
            on entry, and in calls only if nothing says how long the sequence is, or if they drop or have an
            ``attn_mask``. See `ringcp.attention`.
        timeout: seconds (or a `timedelta`) to wait for peers; None is the process group's own timeout.

    Yields:
        The `Context`, which `current_context` also gives: layout, mask, positions.

    Raises:
        ArgumentError, LayoutError, UnsupportedError: an argument that does not fit; on entry, before any buffer is
            touched, naming the buffer. Peers raise `AgreementError`.
        AgreementError: the ranks entered with different arguments.
        PeerError: a peer did not come.

    Warns:
        UserWarning: there were buffers, and no attention was seen in the body: the model was not context parallel.
    """
    group = group_of(mesh)
    state = state_of(group)
    given: list[Given] = []
    words, seconds = "", None
    failure: Exception | None = None
    refusal: RingcpError | None = None
    try:
        options = Options(
            mask=mask,
            layout=layout,
            mode=mode,
            ulysses_degree=degree_in(mesh, ulysses_degree),
            gather_memory=gather_memory,
            save=save,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            kernel=kernel,
            agree=agree,
            timeout=timeout,
        )
        given = checked_buffers(buffers, buffer_seq_dims, no_restore_buffers)
        outer = None if given else _context_of_shards(group.group_name, layout)
        options = options if outer is None else options.inside(outer.options)
        options = _with_defaults(options, mesh.device_type)
        check_options(options, state.world_size)
        layout = sized(layout, given, mask, state.world_size, None if outer is None else outer.layout)
        if outer is not None:
            _check_within(options.mask, outer)
        if mask is None:
            check_no_documents(given, layout)
        seconds = seconds_of(options.timeout)
        context = make_context(mesh, group.group_name, state.rank, options._replace(layout=layout))
        held = []
        if isinstance(layout, Layout):
            held = [Buffer(*each, layout_of(each, layout), group, state, seconds) for each in given]
        words = "; ".join(
            [
                f"call=context_parallel; layout={layout!r}; mask={options.mask}; mode={options.mode}; "
                f"ulysses_degree={options.ulysses_degree}; gather_memory={options.gather_memory}; save={options.save}; "
                f"softcap={options.softcap}; alibi_slopes={slopes_text(options.alibi_slopes)}; "
                f"kernel={options.kernel}; agree={options.agree}; ranks a node={state.ranks_per_node}",
                f"number of buffers={len(given)}",
                *(f"{each.name}={each}" for each in given),
                *(numbers_text(given) if state.world_size > 1 else ()),
            ]
        )
    except Exception as error:  # whatever it is, this rank votes before it raises
        failure = error
        refusal = error if isinstance(error, RingcpError) else RingcpError(f"{type(error).__name__}: {error}")
    try:
        vote(state, words, 0, refusal, seconds)
    except RingcpError:
        if failure is not None:
            raise failure from None
        raise
    session = _Session(context, held, state, seconds)
    try:
        with session.resume():
            yield context
    finally:
        state.layout_left = layout.name if isinstance(layout, Layout) else layout
    if given and not session.calls:
        warnings.warn(
            "context_parallel: expected attention in the body, got none: buffers were sharded, but the model was not "
            "context parallel. Check that it calls F.scaled_dot_product_attention, with these buffers.",
            UserWarning,
            stacklevel=callers_level(),
        )


class _Session:
    """One `context_parallel`, from its entry for as long as graphs of its body can recompute."""

    def __init__(self, context: Context, buffers: list[Buffer], state: GroupState, timeout: float | None) -> None:
        self.context = context
        self.calls = 0
        self.outer: Session | None = next(sessions(), None)
        self._buffers, self._state, self._timeout = buffers, state, timeout

    def holds(self, x: Tensor) -> bool:
        """Whether x is one of the buffers, and a shard now."""
        return any(buffer.tensor is x and buffer.inside for buffer in self._buffers)

    @contextmanager
    def resume(self) -> Iterator[None]:
        """Enter the context, at first or again; nothing to do in it."""
        if is_active(self):
            yield
            return
        whole = [buffer for buffer in self._buffers if not buffer.inside]
        with ExitStack() as stack:
            stack.enter_context(sharded_in_place(whole, self._state, self._timeout))
            stack.enter_context(saving_shards(self._buffers))
            stack.enter_context(intercepted(self))
            yield


def current_context() -> Context | None:
    """The innermost `context_parallel` around the caller; None outside of all, and in a `local_attention` region."""
    session = active_session()
    return None if session is None else session.context


@eager
def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    *,
    layout: Layout | str | None = None,
) -> list[Tensor]:
    """The whole tensors, on every rank, from shards that a `context_parallel` on `mesh` made or computed.

    Args:
        mesh: the mesh of the context.
        buffers: this rank's shards, any number.
        seq_dims: the sequence dim of each.
        layout: the layout of the shards. None is the layout of the `context_parallel` on this mesh around the caller;
            outside of one, head-tail.

    Returns:
        The tensors in the order of the sequence. Differentiable: each rank gets the sum over all ranks of the gradients
        of its rows.

    Raises:
        ArgumentError: not one dim for each buffer.
        LayoutError: `layout` is None and the last context on this mesh had another layout than head-tail; or shards
            that do not fit the layout.
        AgreementError, PeerError: as `ringcp.unshard`.
    """
    group = group_of(mesh)
    state = state_of(group)
    try:
        tensors, dims = listed("buffers", buffers, "tensors"), listed("seq_dims", seq_dims, "integers")
        if len(tensors) != len(dims):
            raise ArgumentError(
                f"seq_dims: expected one for each of the {len(tensors)} buffers, got {len(dims)}; give one dim a buffer"
            )
        if layout is None:
            layout = layout_around(group.group_name) or layout_left(state, None)
    except RingcpError as refusal:
        vote(state, "", 0, refusal)
        raise
    return [unshard(x, mesh, dim=dim, layout=layout) for x, dim in zip(tensors, dims, strict=True)]


def _with_defaults(options: Options, device_type: str) -> Options:
    """With what is not said: when to vote, and for mode "auto" what `set_rotate_method` has said, if it has."""
    if options.mode == "auto":
        mode = rotate_mode() or "auto"
        options = options._replace(mode="usp" if mode == "ring" and options.ulysses_degree is not None else mode)
    return options.with_agree(device_type)


def _context_of_shards(group_name: str, layout: Layout | str) -> Context | None:
    """The context on the same mesh whose shards are those of a context without buffers, of this layout."""
    outer: Context | None = context_around(group_name)
    if outer is None:
        return None
    named = outer.layout.name if isinstance(outer.layout, Layout) else outer.layout
    return outer if layout in ("auto", outer.layout, named) else None


def _check_within(mask: Mask | None, outer: Context) -> None:
    """Whether a mask for some layers should leave the one around them out, nobody can tell: it must not matter."""
    if mask is None or outer.mask is None:
        return
    if isinstance(outer.layout, Layout):
        seq_len = outer.layout.rest.seq_len
    else:  # nothing has said how long the sequence is: one in which each number of the masks shows
        seq_len = 2 + 2 * max(int(each.superset.spec.max()) for each in (mask, outer.mask))
    if not mask.within(outer.mask, seq_len):
        raise ArgumentError(
            f"mask: expected one that allows no more than {outer.mask}, the mask of the context around, got {mask}; "
            "combine them with &, or give the outer context no mask"
        )


def check_options(options: Options, world_size: int) -> None:
    """Raises an error of ours for the first option that is not one of its words, or does not fit that many ranks."""
    wrong = options_problem(options)
    if wrong:
        raise ArgumentError(wrong)
    assert options.agree is not None, "callers say when"
    check_layout(options.layout, world_size)
    if options.kv_layout is not None:
        check_layout(options.kv_layout, world_size, "kv_layout")
    check_mode(options.mode, options.ulysses_degree, world_size)
    check_kernel_name(options.kernel)
    check_agree(options.agree)
    check_save(options.save)
