"""The time of a step from measured kernels: what the tables cover is looked up, the rest is the step cost's."""

from __future__ import annotations

from dataclasses import dataclass

from foliolm.core.errors import ConfigError
from foliolm.core.plan import DecodeRows, StepPlan
from foliolm.ledger.accounts import distinct_experts
from foliolm.ledger.kernel_tables import MLP, KernelTables
from foliolm.ledger.plan_cost import counts_of_plan
from foliolm.ledger.step_cost import StepCost
from foliolm.shape.inventory import moe_layers
from foliolm.shape.model import ModelShape


@dataclass(frozen=True, slots=True)
class HostTimes:
    """What no kernel table holds; a machine's, not an engine version's.

    Attributes:
        step_s, sequence_s: host seconds of a step, and of each sequence in it.
        link: bytes a second at which an all-reduce sends.
        collective_s: seconds to start one all-reduce.
    """

    step_s: float = 0.0
    sequence_s: float = 0.0
    link: float = 0.0
    collective_s: float = 0.0


class KernelCost:
    """A `SteadyCost` of kernel tables.

    ``t = t0 + B·ts + once(N) + layers · (dense(N) + attention) + per_sequence(S) [+ all-reduce]``

    Attention of a step is its own table's entry: of decodes alone, of a chunk alone, or of a chunk beside decodes,
    which is dearer than both together. Of several chunks the one with most work stands for the row of the table, and
    each other adds what it takes alone less what the smallest takes (a launch that is not repeated). Decode contexts
    enter by their mean, and by how far the longest is above it.

    Args:
        tables: measured, of one of the devices that share the model.
        shape: the model.
        cost: its ``model`` is the account; its coefficients are those of all-reduces, unless ``host`` says.
        host: None: kernels alone, and the step cost's own prior for all-reduces.
        expert_ranks: engines that share the experts among them: each computes its part of the experts for all.

    Raises:
        ConfigError: the tables cannot be those of the model.
    """

    def __init__(
        self,
        tables: KernelTables,
        shape: ModelShape,
        cost: StepCost,
        host: HostTimes | None = None,
        expert_ranks: int = 1,
    ) -> None:
        if any(spec.window for spec in cost.model.kv) or shape.mla is not None:
            raise ConfigError(f"kernel tables hold attention over the whole context; {shape.name} has another kind")
        if shape.moe is not None and tables.experts is None:
            raise ConfigError(f"{tables.folder} has no moe.csv, and {shape.name} routes to experts")
        self.tables, self.shape, self.cost = tables, shape, cost
        self.tensor_parallel_size = cost.model.tensor_parallel_size
        if host is None:
            link = cost.coefficients.link * (cost.peer_link or 0.0)
            host = HostTimes(0.0, 0.0, link, cost.coefficients.collective_s)
        self.host = host
        self._routed = moe_layers(shape) if shape.moe is not None else 0
        self._expert_ranks = expert_ranks
        self._dense: dict[int, float] = {}
        self._longest = (-1, 0)
        self.knows_steady = True
        self._without_attention: dict[int, float] = {}

    def seconds(self, plan: StepPlan) -> float:
        """Predicted seconds of the whole step."""
        if not plan.num_rows:
            return 0.0
        decodes = plan.decodes
        if not plan.rows and not plan.swapped:
            return self.steady_seconds(len(decodes), decodes.context_tokens, self._longest_context(decodes))
        rows, context = len(decodes.request_ids), decodes.context_tokens
        longest = self._longest_context(decodes) if rows else 0
        chunks = []
        for row in plan.rows:
            if row.num_new_tokens == 1:
                rows, context, longest = rows + 1, context + row.context, max(longest, row.context)
            else:
                chunks.append((row.num_new_tokens, row.context))
        tokens = max(plan.padded_tokens, plan.num_tokens)
        attention = self.attention(rows, context, longest, chunks)
        sampled = sum(curve(plan.num_sampled) for curve in self.tables.per_sequence.values()) if plan.num_sampled else 0
        return (
            self.host.step_s
            + self.host.sequence_s * plan.num_rows
            + self.linears(tokens)
            + self.shape.num_layers * attention
            + sampled
            + self.all_reduces(tokens)
            + (self.cost.swap_seconds(counts_of_plan(self.cost.model, plan)) if plan.swapped else 0.0)
        )

    def steady_seconds(self, num_decodes: int, context: int, longest: int) -> float:
        """Predicted seconds of a step of decodes alone."""
        known = self._without_attention.get(num_decodes)
        if known is None:
            known = self._without_attention[num_decodes] = (
                self.host.step_s
                + self.host.sequence_s * num_decodes
                + self.linears(num_decodes)
                + sum(curve(num_decodes) for curve in self.tables.per_sequence.values())
                + self.all_reduces(num_decodes)
            )
        return known + self.shape.num_layers * self._decodes_alone(num_decodes, context / num_decodes, longest)

    def steady_line(self, num_decodes: int) -> None:
        """Attention is a table's, and no line."""

    def linears(self, tokens: int) -> float:
        """Seconds of everything that depends on new tokens alone, all layers."""
        known = self._dense.get(tokens)
        if known is not None:
            return known
        tables, layers = self.tables, self.shape.num_layers
        total = sum(curve(tokens) for curve in tables.once.values())
        for name, (calls, curve) in tables.a_layer.items():
            times = layers - self._routed if name in MLP else layers
            total += calls * times * curve(tokens)
        if self._routed:
            assert self.shape.moe is not None
            assert tables.experts is not None
            every = tokens * self._expert_ranks
            reached = distinct_experts(self.shape.moe.num_experts, self.shape.moe.experts_per_token, every)
            # A rank has its share of the experts, and of the rows that all ranks send to them.
            total += self._routed * tables.experts(tokens, reached / self._expert_ranks)
        self._dense[tokens] = total
        return total

    def attention(self, decodes: int, context: float, longest: float, chunks: list[tuple[int, int]]) -> float:
        """Seconds of one layer's attention.

        Args:
            decodes: rows of one new token.
            context: their contexts together.
            longest: the longest of them.
            chunks: (new, cached) tokens.
        """
        tables = self.tables
        if not chunks:
            return self._decodes_alone(decodes, context / decodes, longest) if decodes else 0.0
        largest = max(chunks, key=lambda chunk: chunk[0] * (chunk[1] + chunk[0] / 2))
        if decodes:
            mean = context / decodes
            total = tables.mixed(*largest, decodes, mean)
            share = tables.mixed_skew(decodes)
            if share and longest > mean:
                total += share * (tables.mixed(*largest, decodes, longest) - total)
        else:
            total = tables.prefill(*largest)
        if len(chunks) > 1:
            launch = tables.prefill(0, 0)
            total += sum(tables.prefill(*chunk) - launch for chunk in chunks)
            total -= tables.prefill(*largest) - launch
        return total

    def _decodes_alone(self, rows: int, mean: float, longest: float) -> float:
        tables = self.tables
        total = tables.decodes(rows, mean)
        share = tables.pure_skew(rows)
        if share and longest > mean:
            total += share * (tables.decodes(rows, longest) - total)
        return total

    def _longest_context(self, decodes: DecodeRows) -> int:
        """Looked for when the decodes change, not in every step."""
        if self._longest[0] != decodes.version:
            self._longest = (decodes.version, max(decodes.offsets))
        return self._longest[1] + decodes.tick

    def all_reduces(self, tokens: int) -> float:
        """Seconds of two ring all-reduces a layer: ``2 (t − 1) / t`` of the tensor each, and a start."""
        size = self.tensor_parallel_size
        if size == 1:
            return 0.0
        sent = tokens * self.shape.hidden_size * 2 * 2 * (size - 1) / size
        each = self.host.collective_s + (sent / self.host.link if self.host.link else 0.0)
        return 2 * self.shape.num_layers * each
