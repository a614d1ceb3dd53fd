"""A model that the native CPU kernels walk: one call a step, one for the output head."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foliolm.model.decoder import StepInput
from foliolm.model.layer import LayerKV
from foliolm.model.native_lora import NativeLora
from foliolm.ops.attention import Attention
from foliolm.ops.lora import LoraRows
from foliolm.ops.native import abi
from foliolm.ops.native.abi import Format, KVFormat
from foliolm.ops.native.draw import DrawCall
from foliolm.ops.native.library import Library
from foliolm.ops.native.packed import PackedWeight
from foliolm.shape.model import ModelShape

KV_FORMATS = {torch.float32: KVFormat.F32, torch.bfloat16: KVFormat.BF16, torch.int8: KVFormat.I8}

MOST_KEPT = 16 << 20
"""Bytes of logits that stay allocated for the next step's."""


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """Matrices over one input, their outputs side by side.

    Attributes:
        parts: at most three.
        bias: [sum of the parts' n] float32, or None.
    """

    parts: tuple[PackedWeight, ...]
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it occupies."""
        return sum(part.nbytes for part in self.parts) + (0 if self.bias is None else self.bias.nbytes)

    def struct(self) -> abi.Linear:
        """For a call; valid while this object lives."""
        parts = (abi.Weight * 3)(*(part.struct() for part in self.parts))
        return abi.Linear(len(self.parts), parts, None if self.bias is None else self.bias.data_ptr())


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """Weights of one layer; see ``DecoderLayer``. Norms are float32; ``gate_up`` has two parts, ``qkv`` three."""

    input_norm: Tensor
    post_norm: Tensor
    qkv: NativeLinear
    o: NativeLinear
    gate_up: NativeLinear
    down: NativeLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    group: int

    def struct(self) -> abi.Layer:
        """For a call; valid while this object lives."""
        return abi.Layer(
            self.input_norm.data_ptr(),
            self.post_norm.data_ptr(),
            None if self.q_norm is None else self.q_norm.data_ptr(),
            None if self.k_norm is None else self.k_norm.data_ptr(),
            self.qkv.struct(),
            self.o.struct(),
            self.gate_up.struct(),
            self.down.struct(),
            self.group,
        )

    @property
    def linears(self) -> tuple[NativeLinear, ...]:
        """All four."""
        return self.qkv, self.o, self.gate_up, self.down


@dataclass(slots=True)
class _KVPointers:
    """A pool's layers as the kernels take them."""

    layers: Sequence[LayerKV]
    keys: ctypes.Array[ctypes.c_void_p]
    values: ctypes.Array[ctypes.c_void_p]


@dataclass(slots=True)
class _Call:
    """A call of a step, with what its pointers lead to."""

    step: StepInput
    kv: Sequence[LayerKV]
    struct: abi.Step
    hidden: Tensor
    pointer: int  # of hidden


@dataclass(slots=True)
class _Tops:
    """Where the likeliest tokens of so many rows are written."""

    best: NDArray[np.float32]
    tokens: NDArray[np.int64]
    pointers: tuple[int, int]


@dataclass(slots=True)
class NativeModel:
    """Weights of a model, packed for the kernels. Activations are float32.

    Attributes:
        shape: its sizes.
        library: the kernels.
        embed: [rows, hidden], only looked up.
        layers: in order.
        norm: [hidden].
        head: to [num_tokens]; tied, its panels are the embedding's.
        frequencies, rope_scale: rotary frequencies [D/2] float32, and the factor on cosine and sine.
        num_tokens: token ids that exist.
        kv_dtype: of keys and values: float32, bfloat16 or int8.
        weights_name: how the matrices are stored, for people and for the books.
        deterministic: a token's result does not depend on what else its step holds: queries of decodes are treated as
            those of prompts are, and float products of single rows wait for their own sums.
    """

    shape: ModelShape
    library: Library
    embed: PackedWeight
    layers: list[NativeLayer]
    norm: Tensor
    head: NativeLinear
    frequencies: Tensor
    rope_scale: float
    num_tokens: int
    kv_dtype: torch.dtype
    weights_name: str
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    native: bool = True
    lora: NativeLora | None = None
    deterministic: bool = False
    _struct: abi.Model | None = None
    _head: abi.Linear | None = None
    _kv: _KVPointers | None = None
    _call: _Call | None = None
    _tops: _Tops | None = None
    _drawing: DrawCall | None = None

    def enable_lora(self, num_slots: int) -> NativeLora:
        """See ``Model``. Adapters are float32 where the weights are, else bfloat16."""
        form = Format.F32 if self.weights_name == "float32" else Format.BF16
        self.lora = NativeLora(self.shape, self.library, self.num_tokens, num_slots, form)
        return self.lora

    def forward(self, step: StepInput, kv: Sequence[LayerKV], attention: Attention | None = None) -> Tensor:
        """One step of the packed batch; writes the new tokens' keys and values.

        Args:
            step: laid out for the variable-length kernel.
            kv: a layer's each, in the layers' order.
            attention: not used: the kernels have their own.

        Returns:
            [S, hidden] float32 normalised hidden states of ``step.rows``; in the same memory, where the same ``step``
            comes again.

        Raises:
            RuntimeError: the kernels failed (memory).
        """
        call = self._call
        if call is None or call.step is not step or call.kv is not kv:
            call = self._call = self._prepared(step, kv)
        call.struct.threads = torch.get_num_threads()
        self.library.check(self.library.calls.folio_forward(ctypes.byref(self._model()), ctypes.byref(call.struct)))
        return call.hidden

    def _prepared(self, step: StepInput, kv: Sequence[LayerKV]) -> _Call:
        """The structure of a step's call, and where its result will lie."""
        rows = [layout.varlen for layout in step.layouts]
        first = rows[0]
        assert first is not None
        outputs = step.rows
        hidden = torch.empty(len(outputs), self.shape.hidden_size)
        groups = (abi.Group * len(rows))()
        for group, layout, varlen in zip(groups, step.layouts, rows, strict=True):
            assert varlen is not None
            group.table, group.width = varlen.block_table.data_ptr(), varlen.block_table.shape[1]
            group.slots, group.window = layout.slots.data_ptr(), layout.window or 0
        pointers = self._pointers(kv)
        struct = abi.Step(
            len(step.input_ids),
            len(first.seqused_k),
            len(outputs),
            step.input_ids.data_ptr(),
            step.positions.data_ptr(),
            outputs.data_ptr(),
            first.cu_seq_q.data_ptr(),
            first.seqused_k.data_ptr(),
            groups,
            ctypes.addressof(pointers.keys),
            ctypes.addressof(pointers.values),
            kv[0].keys.shape[1],
            int(KV_FORMATS[kv[0].keys.dtype]),
            1,
            hidden.data_ptr(),
            None,
            self.deterministic,
        )
        if step.lora is not None and self.lora is not None:
            struct.lora = ctypes.pointer(self.lora.struct(step.lora, step.lora_outputs))
        return _Call(step, kv, struct, hidden, hidden.data_ptr())

    def logits(self, hidden: Tensor, lora: LoraRows | None = None) -> Tensor:
        """[S, hidden] to [S, num_tokens] float32; ``lora``: adapters of those rows."""
        hidden = hidden.contiguous()
        logits = torch.empty(len(hidden), self.num_tokens)
        self._product(hidden.data_ptr(), len(hidden), logits.data_ptr(), lora)
        return logits

    def _product(self, hidden: int, rows: int, logits: int, lora: LoraRows | None = None) -> None:
        """The head's product, from ``rows`` rows of floats to where the logits shall lie."""
        if self._head is None:
            self._head = self.head.struct()
        adapters, index = None, 0
        if lora is not None and self.lora is not None:
            adapters, index = ctypes.pointer(self.lora.struct(lora)), self.lora.head_index
        self.library.check(
            self.library.calls.folio_linear(
                ctypes.byref(self._head),
                hidden,
                rows,
                logits,
                torch.get_num_threads(),
                self.deterministic,
                adapters,
                index,
            )
        )

    def drawn(self, hidden: Tensor, draws: NDArray[np.void]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """[S] each row's largest logit of the bare head (NaN, if there is one), and the token that is drawn.

        Args:
            hidden: [S, hidden].
            draws: [S], see ``ops.native.draw``; where the same array comes again, so does the memory of the logits.
        """
        drawing = self._drawing
        if drawing is None or drawing.draws is not draws:
            drawing = DrawCall(self.library, torch.empty(len(hidden), self.num_tokens), draws)
            self._drawing = drawing if drawing.logits.nbytes <= MOST_KEPT else None
        call = self._call
        if call is not None and hidden is call.hidden:
            pointer, rows = call.pointer, call.struct.num_outputs
        else:
            hidden = hidden.contiguous()
            pointer, rows = hidden.data_ptr(), len(hidden)
        self._product(pointer, rows, drawing.logits_pointer)
        return drawing.run(torch.get_num_threads())

    def likeliest(self, hidden: Tensor) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """See ``Model``; the logits stay with the kernels."""
        if self._head is None:
            self._head = self.head.struct()
        call = self._call
        if call is not None and hidden is call.hidden:
            pointer, rows, threads = call.pointer, call.struct.num_outputs, call.struct.threads
        else:
            hidden = hidden.contiguous()
            pointer, rows, threads = hidden.data_ptr(), len(hidden), torch.get_num_threads()
        tops = self._tops
        if tops is None or len(tops.best) != rows:
            best, tokens = np.empty(rows, np.float32), np.empty(rows, np.int64)
            tops = self._tops = _Tops(best, tokens, (best.ctypes.data, tokens.ctypes.data))
        self.library.check(
            self.library.calls.folio_likeliest(
                ctypes.byref(self._head),
                pointer,
                rows,
                threads,
                self.deterministic,
                *tops.pointers,
            )
        )
        return tops.best.copy(), tops.tokens.copy()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        total = self.embed.nbytes + self.norm.nbytes
        if self.head.parts[0].data.data_ptr() != self.embed.data.data_ptr():
            total += self.head.nbytes
        for layer in self.layers:
            total += layer.input_norm.nbytes + layer.post_norm.nbytes
            total += sum(linear.nbytes for linear in layer.linears)
            total += sum(0 if norm is None else norm.nbytes for norm in (layer.q_norm, layer.k_norm))
        return total

    @property
    def bits(self) -> tuple[float, float]:
        """Stored bits a weight, scales included: of the layers' matrices, and of the head."""
        parts = [part for layer in self.layers for linear in layer.linears for part in linear.parts]
        body = 8.0 * sum(part.nbytes for part in parts) / sum(part.n * part.k for part in parts)
        return body, 8.0 * self.embed.nbytes / (self.embed.n * self.embed.k)

    @property
    def body_format(self) -> Format:
        """The format that most bytes of the layers' matrices have."""
        held: dict[Format, int] = {}
        for layer in self.layers:
            for linear in layer.linears:
                for part in linear.parts:
                    held[part.format] = held.get(part.format, 0) + part.nbytes
        return max(held, key=lambda form: held[form])

    def _model(self) -> abi.Model:
        if self._struct is None:
            shape = self.shape
            self._struct = abi.Model(
                shape.hidden_size,
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                shape.intermediate_size,
                len(self.layers),
                shape.rms_norm_eps,
                self.rope_scale,
                self.frequencies.data_ptr(),
                self.norm.data_ptr(),
                (abi.Layer * len(self.layers))(*(layer.struct() for layer in self.layers)),
                self.embed.struct(),
            )
        return self._struct

    def _pointers(self, kv: Sequence[LayerKV]) -> _KVPointers:
        if self._kv is None or self._kv.layers is not kv:
            kind = ctypes.c_void_p * len(kv)
            self._kv = _KVPointers(
                kv, kind(*(layer.keys.data_ptr() for layer in kv)), kind(*(layer.values.data_ptr() for layer in kv))
            )
        return self._kv
