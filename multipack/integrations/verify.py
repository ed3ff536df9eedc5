"""Ask a model, by a forward of a few tokens, whether packing is right for it.

Packing is right only if a token sees nothing of other sequences, nothing of the future, and what its own
model shows it when the sequence is alone. The rule: what a model does with boundaries is measured, never
concluded from its name.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from multipack.data.collate import PackedCollator
from multipack.integrations.attention import ATTENTION, model_inputs, stock_attention

_SPANS = re.compile(r"window|chunk|local_attention|local_attn|index_topk|rel_extent|block_size")
_NO_SPANS = re.compile(r"layers|feed_forward|head|inference|pattern|audio|vision|image")
_SHORT = (6, 11, 5)


def verify_packing(
    model: Any,
    *,
    max_length: int | None = None,
    device: torch.device | None = None,
    inputs_of: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> None:
    """Run three packed sequences and each of them alone, and compare; nothing of the model changes.

    The second sequence is longer than every window or chunk that the configuration names, up to `max_length`.
    Tokens of the other two are changed, and its own last one: none of its other logits may move (in the mode,
    training or evaluation, that the model is in, with the same dropout). The logits of all three must equal
    those of each sequence alone by the stock implementation of transformers ("sdpa" where the model supports
    it, else "eager").

    Parameters that are zero throughout, as fresh adapters and gates are, hide what stands behind them; they
    are given small numbers for the time of the check. Call it where training runs: on its device, under its
    autocast, on all ranks alike.

    Args:
        model: a causal language model of transformers, also inside DistributedDataParallel, FSDP2, DeepSpeed
            or peft.
        max_length: the longest sequence of the run, tokens: windows that no sequence fills need no check.
        device: where batches go; None: where the first parameter is.
        inputs_of: makes the model's arguments of a batch of PackedCollator; None: `model_inputs`, without its
            `segments` where the attention is not ours.

    Raises:
        ValueError: packed sequences see each other, a token sees the future, or logits differ from those of
            the stock implementation; or the model cannot run them. Names the model and the remedy.
        TypeError: the model is none of transformers.
    """
    inner = _inner(model)
    if not hasattr(inner, "set_attn_implementation"):
        raise TypeError(
            f"verify_packing takes a model of transformers, got {type(inner).__name__}: its stock attention "
            "is what packed logits are compared with."
        )
    probe = _Probe(model, inner, device, inputs_of)
    sequences = _sequences(inner, _longest_span(inner, max_length))
    devices = [probe.device] if probe.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad(), _no_zeros(inner, probe.device):
        _check_visibility(probe, sequences)
        with _evaluating(model):
            _check_alone(probe, sequences)


def packing_models(module: nn.Module) -> list[Any]:
    """The outermost transformers models inside `module` that are trained: those that `verify_packing` is
    for."""
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        return [module] if any(p.requires_grad for p in module.parameters()) else []
    return [found for child in module.children() for found in packing_models(child)]


class _Probe:
    """A model with its way of taking batches."""

    def __init__(
        self,
        model: Any,
        inner: Any,
        device: torch.device | None,
        inputs_of: Callable[[dict[str, Any]], dict[str, Any]] | None,
    ) -> None:
        self._model = model
        self.inner = inner
        self._inputs_of = inputs_of or self._plain_inputs
        self.device: torch.device = device or next(iter(inner.parameters())).device
        self._narrowest = 8
        self.config = inner.config
        kind = getattr(self.config, "model_type", "?")
        name = getattr(self.config, "name_or_path", "")
        self.name = f"{type(inner).__name__} (model_type {kind!r}{f', {name}' if name else ''})"

    def packed(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Logits of each of the sequences in one packed row, [length, vocabulary]."""
        batch = PackedCollator()([{"input_ids": ids} for ids in sequences])
        moved = {
            key: value.to(self.device) if isinstance(value, Tensor) else value for key, value in batch.items()
        }
        try:
            torch.manual_seed(0)  # the same dropout in every forward; the caller's generators are kept aside
            with self._watching_widths():
                logits: Tensor = self._model(**self._inputs_of(moved)).logits
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise self.refusal(f"the packed forward fails: {type(error).__name__}: {error}") from error
        if logits.shape[1] != sum(map(len, sequences)):
            raise self.refusal(f"{logits.shape[1]} logits came for {sum(map(len, sequences))} tokens.")
        return list(torch.split(logits[0].float(), [len(ids) for ids in sequences]))

    def alone(self, ids: Tensor) -> Tensor:
        """Logits of one sequence by the stock implementation, [length, vocabulary]."""
        implementation = "sdpa" if getattr(self.inner, "_supports_sdpa", False) else "eager"
        row = ids[None].to(self.device)
        try:
            return self._stock_logits(row, implementation)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if implementation == "eager":
                raise self.refusal(f"its stock attention fails: {type(error).__name__}: {error}") from error
        try:  # such as soft caps, which "sdpa" refuses
            return self._stock_logits(row, "eager")
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise self.refusal(f"its stock attention fails: {type(error).__name__}: {error}") from error

    def _stock_logits(self, row: Tensor, implementation: str) -> Tensor:
        with stock_attention(self.inner, implementation):
            logits: Tensor = self._model(input_ids=row, use_cache=False).logits
        return logits[0].float()

    def _plain_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        inputs = model_inputs(batch)
        if self.config._attn_implementation != ATTENTION:
            del inputs["segments"]
        return inputs

    def refusal(self, reason: str) -> ValueError:
        return ValueError(
            f"{self.name} cannot be trained on packed batches with "
            f"attn_implementation={self.config._attn_implementation!r}: {reason.rstrip('.')}. Train it "
            "padded (PaddedCollator or sample_packing: false, and a stock attention); a model with "
            "recurrent layers (convolutions, state spaces, linear attention) packs where transformers has "
            "kernels that take boundaries for it (causal-conv1d, mamba-ssm, flash-linear-attention on CUDA)."
        )

    @contextlib.contextmanager
    def _watching_widths(self) -> Iterator[None]:
        """Note how narrow the linear layers compute: autocast, FSDP and quantised layers decide it, not the
        parameters."""

        def note(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.dtype.is_floating_point:
                self._narrowest = min(self._narrowest, output.dtype.itemsize)

        hooks = [m.register_forward_hook(note) for m in self.inner.modules() if isinstance(m, nn.Linear)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def exact(self) -> bool:
        """Whether the forwards so far computed in float32 or wider."""
        return self._narrowest >= 4


def _check_visibility(probe: _Probe, sequences: Sequence[Tensor]) -> None:
    """Tokens elsewhere and the last one of the sequence in the middle are changed: its other logits stay."""
    before, middle, after = sequences
    others = [ids.flip(0).roll(1) for ids in (before, after)]
    ended = torch.cat([middle[:-1], before[:1]])
    right = probe.packed(sequences)[1][:-1]
    tolerance = 1e-4 if probe.exact else 2e-2
    if _far(probe.packed([others[0], ended, others[1]])[1][:-1], right, tolerance):
        future = _far(probe.packed([before, ended, after])[1][:-1], right, tolerance)
        raise probe.refusal(
            "a token sees the future: logits change when the last token of their sequence does."
            if future
            else "sequences see each other: logits change when the tokens of other sequences in the row do."
        )


def _check_alone(probe: _Probe, sequences: Sequence[Tensor]) -> None:
    tolerance = 0.1
    if probe.exact:
        tolerance = 1e-2 if torch.backends.cuda.matmul.allow_tf32 else 1e-3
    for ids, packed in zip(sequences, probe.packed(sequences), strict=True):
        alone = probe.alone(ids)
        if alone.shape != packed.shape or _far(packed, alone, tolerance):
            raise probe.refusal(
                f"the logits of a sequence of {len(ids)} tokens in a packed row are not those of the "
                "sequence alone by the stock attention."
            )


def _far(found: Tensor, right: Tensor, tolerance: float) -> bool:
    """Whether some token's logits differ by more than `tolerance` times their spread; NaN differs."""
    spread = (right - right.mean(-1, keepdim=True)).norm(dim=-1)
    return not bool(((found - right).norm(dim=-1) <= tolerance * spread + 1e-6).all())


def _sequences(inner: Any, longest: int) -> list[Tensor]:
    """Three sequences of tokens without a special meaning, the second of `longest` tokens or more."""
    config = inner.config.get_text_config()
    special = {
        value
        for part in (inner.config, config)
        for name, value in vars(part).items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    ordinary = torch.tensor([token for token in range(config.vocab_size) if token not in special])
    lengths = [_SHORT[0], max(_SHORT[1], longest), _SHORT[2]]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(ordinary), (sum(lengths),), generator=generator)
    return list(torch.split(ordinary[drawn], lengths))


def _longest_span(inner: Any, max_length: int | None) -> int:
    """Tokens that fill every window or chunk of the configuration, and a few more; as many as the run has at
    most."""
    config = inner.config.get_text_config()
    spans = [
        number
        for name, value in vars(config).items()
        if _SPANS.search(name) and not _NO_SPANS.search(name)
        for number in (value if isinstance(value, list) else [value])
        if isinstance(number, int) and not isinstance(number, bool)
    ]
    longest = max(spans, default=0) + 4
    limits = [max_length, getattr(config, "max_position_embeddings", None)]
    return min([longest, *(limit for limit in limits if limit is not None and limit > 0)])


def _inner(model: Any) -> Any:
    """The transformers model inside wrappers."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        if not type(module).__module__.startswith(
            "bitsandbytes"
        ):  # whose layers repack their weights on eval()
            module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def _no_zeros(inner: nn.Module, device: torch.device) -> Iterator[None]:
    """Give parameters that are zero throughout small numbers while open, the same on all ranks."""
    generator = torch.Generator(device).manual_seed(0)
    filled = []
    try:
        for parameter in inner.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if local.numel() and local.dtype.is_floating_point and local.device == device and not local.any():
                filled.append(local)
                local.normal_(0.0, 0.05, generator=generator)
        yield
    finally:
        for local in filled:
            local.zero_()
