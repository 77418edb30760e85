"""A frozen teacher for distillation, and the KL divergence of a student's next-token distributions from the teacher's.

Legend: T tokens, D hidden size, V vocabulary.

The teacher is a second model engine on the student's layout. In a forward step it computes the hidden states of the
micro-batch; the divergence is an output of the student, computed from both heads in chunks (below), so no
logits of a whole batch are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.errors import UserError
from mvp_engine.hf.model.language_model import LanguageModel
from mvp_engine.model_engine import ModelEngine
from mvp_engine.ops.logit_stats import HeadGradients, HeadSpec, head_output, logits_of
from mvp_engine.ops.precision import autocast_dtype


class Head(NamedTuple):
    """An output embedding and how it turns hidden states into logits; with tensor parallel, this rank's rows."""

    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    scale: float = 1.0
    softcap: float | None = None

    def spec(self, hidden_TD: Tensor, temperature: float) -> HeadSpec:
        dtype = autocast_dtype(hidden_TD) or hidden_TD.dtype
        return HeadSpec(self.scale, self.softcap, temperature, dtype)


# A value per token, from the hidden states and heads of student and teacher, with options for `linear_kl`.
Divergence = Callable[[Tensor, Head, Tensor, Head, dict[str, Any]], Tensor]


class TeacherOutput:
    """Adds the output `teacher_kl` to a student: a value per token, in forwards inside of `given`."""

    def __init__(self, student: LanguageModel, divergence: Divergence) -> None:
        self.student = student
        self.divergence = divergence
        self._hidden_TD: Tensor | None = None  # of the teacher, of the micro-batch at hand
        self._head: Head | None = None
        student.add_output("teacher_kl", self._in_forward)

    def check_rows(self, teacher: Any, name: str) -> None:
        """Raise if the vocabularies differ; `name` is the teacher's config key and value."""
        student_rows, rows = (_head_rows(model) for model in (self.student, teacher))
        if rows != student_rows:
            raise UserError(
                f"{name} has {rows} rows in its output embedding, the student has {student_rows}: their tokens "
                f"differ. Choose a teacher of the same tokenizer, or set model.config.vocab_size={rows} for a student "
                "from random weights"
            )

    @contextmanager
    def given(self, batch: PackedBatch, hidden_TD: Tensor, head: Head) -> Iterator[None]:
        """A context for the student's forward on `batch`, with the hidden states and the head of its teacher."""
        dummies = sum(dummy.num_tokens for dummy in getattr(batch, "dummies", ()))
        if dummies:  # of media that other ranks have; the model drops their outputs
            hidden_TD = torch.cat([hidden_TD, hidden_TD.new_zeros(dummies, hidden_TD.shape[1])])
        self._hidden_TD, self._head = hidden_TD, head
        yield
        self._hidden_TD = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: copies of the student, as exports make them, need no second teacher (FSDP cannot copy one)."""
        return self

    def _in_forward(self, hidden_TD: Tensor, head: dict[str, Any]) -> Tensor:
        """Called inside of the student's forward, where its head has all of its weights."""
        teacher_TD, teacher = self._hidden_TD, self._head
        assert teacher_TD is not None
        assert teacher is not None
        if self.student.shard is not None:
            teacher_TD = self.student.shard.cut(teacher_TD)
        start = head.get("vocab_start")
        if start is not None:
            rows = slice(start, start + len(head["weight_VD"]))
            bias = None if teacher.bias is None else teacher.bias[rows]
            teacher = teacher._replace(weight=teacher.weight[rows], bias=bias)
        student = Head(head["weight_VD"], head["bias_V"], head["scale"], head["softcap"])
        options = {"chunk": head["chunk"], "group": head.get("group")}
        return self.divergence(hidden_TD, student, teacher_TD, teacher, options)


class Teacher(TeacherOutput):
    """A frozen model on the student's layout."""

    def __init__(
        self, name: str, student: LanguageModel, engine: ModelEngine, divergence: Divergence
    ) -> None:
        """All ranks call it: it gathers the head of the teacher's `engine`. `name` is for errors."""
        super().__init__(student, divergence)
        self.engine = engine
        self.head = gathered_head(engine.model)
        self.check_rows(engine.model, f"distil.teacher={name}")

    @contextmanager
    def reading(self, batch: PackedBatch) -> Iterator[None]:
        """A context for the student's forward on the same batch: the teacher's forward comes first.

        So its activations are gone before those of the student are kept.
        """
        with self.engine.eval_mode():
            hidden_TD = self.engine.model(batch, ["hidden_states"])["hidden_states"]
        with self.given(batch, hidden_TD, self.head):
            yield


def gathered_head(model: Any) -> Head:
    """The whole output embedding of a frozen model, gathered once. All ranks call it."""
    embedding = model.hf.get_output_embeddings()
    weight = full_tensor(embedding.weight.detach())
    bias = None if embedding.bias is None else full_tensor(embedding.bias.detach())
    return Head(weight, bias, model.scale, model.softcap)


def _head_rows(model: Any) -> int:
    return int(model.hf.get_output_embeddings().weight.shape[0])


# The KL divergence between a teacher's and a student's next-token distributions, straight from their hidden states.
#
# Legend: T tokens, C tokens of a chunk, D hidden size, V vocabulary rows on this rank, R ranks.
#
# Logits of both models exist for one chunk of tokens at a time, and backward computes them again: memory is two (C, V)
# blocks instead of two (T, V). With a sharded vocabulary (tensor parallel) each rank has the same rows of both heads,
# and forward makes one all-gather of three numbers per token.


def linear_kl(
    hidden_TD: Tensor,
    head: Head,
    teacher_hidden_TD: Tensor,
    teacher: Head,
    *,
    reverse: bool = False,
    temperature: float = 1.0,
    chunk: int = 2048,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """KL(teacher, student) of each token, (T,) float32; with `reverse` KL(student, teacher).

    Gradients are those of the student. With a `group` the vocabulary is sharded: the results are the same on all ranks,
    all of them must compute the same loss, which counts once, as in `linear_log_probs`.
    """
    if len(head.weight) != len(teacher.weight):
        raise ValueError(
            f"{len(head.weight)} rows of the head, {len(teacher.weight)} of the teacher's"
        )
    specs = (head.spec(hidden_TD, temperature), teacher.spec(teacher_hidden_TD, temperature))
    frozen = (teacher_hidden_TD.detach(), teacher.weight.detach(), teacher.bias)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        divergence_T: Tensor = _LinearKL.apply(
            hidden_TD, head.weight, head.bias, *frozen, specs, reverse, chunk, group
        )
    return divergence_T


class _Saved(NamedTuple):
    hidden: Tensor  # (T, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None
    teacher_hidden: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None
    log_z: Tensor  # (T,), as all below
    teacher_log_z: Tensor
    divergence: Tensor


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        teacher_hidden_TD: Tensor,
        teacher_weight_VD: Tensor,
        teacher_bias_V: Tensor | None,
        specs: tuple[HeadSpec, HeadSpec],
        reverse: bool,
        chunk: int,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        student = (weight_VD.to(specs[0].dtype), bias_V, specs[0])
        teacher = (teacher_weight_VD.to(specs[1].dtype), teacher_bias_V, specs[1])
        of_chunks = []
        for hidden_CD, teacher_CD in zip(
            hidden_TD.split(chunk), teacher_hidden_TD.split(chunk), strict=True
        ):
            logits_CV = logits_of(head_output(hidden_CD, *student), specs[0])
            teacher_CV = logits_of(head_output(teacher_CD, *teacher), specs[1])
            of_chunks.append(_local_stats(logits_CV, teacher_CV, reverse))
        log_z_T, teacher_log_z_T, divergence_T = _merge(torch.cat(of_chunks, 1), reverse, group)
        inputs = (hidden_TD, weight_VD, bias_V, teacher_hidden_TD, teacher_weight_VD)
        saved = _Saved(*inputs, teacher_bias_V, log_z_T, teacher_log_z_T, divergence_T)
        ctx.save_for_backward(*saved)
        ctx.specs = specs
        ctx.reverse = reverse
        ctx.chunk = chunk
        ctx.group = group
        return divergence_T

    @staticmethod
    def backward(ctx: Any, d_divergence_T: Tensor) -> tuple[Tensor | None, ...]:
        saved = _Saved(*ctx.saved_tensors)
        spec: HeadSpec = ctx.specs[0]
        teacher_spec: HeadSpec = ctx.specs[1]
        needs = ctx.needs_input_grad
        gradients = HeadGradients(saved.hidden, saved.weight, saved.bias, needs, spec)
        teacher_weight = saved.teacher_weight.to(teacher_spec.dtype)
        all_reduces = []
        for start in range(0, len(saved.hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            hidden_CD = saved.hidden[rows]
            logits_CV = logits_of(head_output(hidden_CD, gradients.weight, saved.bias, spec), spec)
            raw_CV = head_output(
                saved.teacher_hidden[rows], teacher_weight, saved.teacher_bias, teacher_spec
            )
            log_p_CV = logits_CV - saved.log_z[rows, None]
            teacher_CV = logits_of(raw_CV, teacher_spec) - saved.teacher_log_z[rows, None]
            if ctx.reverse:
                d_logits_CV = log_p_CV - teacher_CV - saved.divergence[rows, None]
                d_logits_CV *= log_p_CV.exp_()
            else:
                d_logits_CV = log_p_CV.exp_() - teacher_CV.exp_()
            d_logits_CV *= d_divergence_T[rows, None]
            if spec.softcap is not None:
                d_logits_CV *= 1 - (logits_CV * (spec.temperature / spec.softcap)).square_()
            gradients.add(rows, hidden_CD, (d_logits_CV * spec.factor).to(spec.dtype))
            if ctx.group is not None and gradients.d_hidden_TD is not None:
                d_hidden_CD = gradients.d_hidden_TD[rows]
                all_reduces.append(dist.all_reduce(d_hidden_CD, group=ctx.group, async_op=True))
        for work in all_reduces:
            work.wait()
        return *gradients.in_input_dtypes(), None, None, None, None, None, None, None


def _local_stats(logits_CV: Tensor, teacher_CV: Tensor, reverse: bool) -> Tensor:
    """Of this rank's vocabulary rows, (3, C): log z of student and teacher, and the divergence of the two softmaxes."""
    log_z_C = logits_CV.logsumexp(-1)
    teacher_log_z_C = teacher_CV.logsumexp(-1)
    log_p_CV = logits_CV.sub_(log_z_C[:, None])
    teacher_CV = teacher_CV.sub_(teacher_log_z_C[:, None])
    from_CV, to_CV = (log_p_CV, teacher_CV) if reverse else (teacher_CV, log_p_CV)
    divergence_C = torch.linalg.vecdot(from_CV.exp(), from_CV - to_CV)
    return torch.stack([log_z_C, teacher_log_z_C, divergence_C])


def _merge(
    stats_3T: Tensor, reverse: bool, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics over the whole vocabulary."""
    if group is None:
        log_z_T, teacher_log_z_T, divergence_T = stats_3T.unbind()
        return log_z_T, teacher_log_z_T, divergence_T
    ranks = dist.get_world_size(group)
    stats_R3T = stats_3T.new_empty(ranks, *stats_3T.shape)
    dist.all_gather_into_tensor(stats_R3T.flatten(0, 1), stats_3T, group=group)
    log_z_T = stats_R3T[:, 0].logsumexp(0)
    teacher_log_z_T = stats_R3T[:, 1].logsumexp(0)
    share_RT = stats_R3T[:, 0] - log_z_T  # the logarithms of each rank's share of the probabilities
    teacher_share_RT = stats_R3T[:, 1] - teacher_log_z_T
    from_RT, to_RT = (share_RT, teacher_share_RT) if reverse else (teacher_share_RT, share_RT)
    divergence_T = (from_RT.exp() * (stats_R3T[:, 2] + from_RT - to_RT)).sum(0)
    return log_z_T, teacher_log_z_T, divergence_T
