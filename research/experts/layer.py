r"""The time of the experts of a layer, and the memory that they take.

A stage has T ranks, in G groups: each group has e = E / G of the E experts, and its T / G ranks share each of them by
columns. A router sends each of R rows to k experts. If it likes all of them alike, balls into bins say that a group
reads

.. math:: D = e \left(1 - (1 - k / E)^R\right)

different experts for its :math:`n = R k / G` rows. The layer takes as long as the group that has most: of G groups with
a mean :math:`\mu` and a standard deviation :math:`\sigma`, by Blom's approximation of the largest of G normal numbers,

.. math:: \mu + \sigma\,\Phi^{-1}\!\left(\frac{G - 3/8}{G + 1/4}\right), \quad
    \sigma_D^2 = e\,p\,(1 - p)(1 - 1/G), \quad \sigma_n^2 = R\,k\,\frac{E - k}{E - 1}\,\frac{1}{G}(1 - 1/G)

with p = D / e, at least one, and never more than all e experts or all rows. Then

.. math:: T_{experts} = T_{router} + T_{top\,k} + T_{permute} + T_{gate,up}(D, n) + T_{act} + T_{down}(D, n)
    + T_{combine} + T_{shared}

A grouped product is priced as one dense product with the weights of D experts and n rows, of the kind that n / D rows
have, with one fixed cost. Where the ranks share attention, all of them have all rows, so each group takes its own, and
the all-reduce of the layer adds up what groups and shares of columns give. Where each rank has sequences of its own
(attention data parallel), each row goes to the :math:`G (1 - \binom{E-e}{k} / \binom{E}{k})` groups that have one of
its experts, and comes back, in two all-to-alls that take as long as the fullest rank's; no sum is left.

The consequence: a few rows read as many experts as they have choices, and time grows with them; from some :math:`E / k`
rows on all weights are read, however few rows each expert has, and only many sequences make that worth while. Expert
parallel divides weights as tensor parallel does, with wider products, and loses to it what the fullest group has more
than the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import NamedTuple

from experts.latent_attention import latent_bytes, one_after_another
from experts.model import ExpertModel
from shotcast.collectives.registry import registered
from shotcast.cost.collective import time_us
from shotcast.cost.inference import KernelWork, product_kind, rows_pass
from shotcast.errors import ConfigError
from shotcast.layers.partition import FFN_UNIT, partition, shard
from shotcast.models.memory_estimate import attention_bytes, most_of_stages, network_bytes
from shotcast.planner.calibration import LINK, Calibration
from shotcast.planner.collectives import CollectiveCosts
from shotcast.planner.step import Priced, in_a_row
from shotcast.wire import Op

STAND_IN, STAND_IN_OF_GROUPS = 0.25, 0.5
"""The error of dense products in place of grouped ones, a part of routed experts' time: without and with groups.

No grouped product was measured here. These are root mean squares of how far published tables of two frameworks' kernels
on the H200 lie from it (research/notes/mixture_of_experts.md), nearly all of them above; no constant is fitted to them.
"""
_SCORE_BYTES = 4
_CHOICE_BYTES = 8


class GroupWork(NamedTuple):
    """The work of the group of ranks that has most of a layer.

    Attributes:
        experts: the different experts that it reads.
        rows: the rows that these compute, one for each choice.
        mean_rows: those of a group on average.
        rows_of_expert: the rows of each expert that is read, on average over all groups.
    """

    experts: float
    rows: float
    mean_rows: float
    rows_of_expert: float


class ExpertSharing(NamedTuple):
    """The division of a layer's experts between the ranks of a stage.

    Attributes:
        ranks: of the stage.
        groups: of ranks, with different experts each.
        spread: each rank has rows of its own; otherwise all have the same rows.
    """

    ranks: int
    groups: int
    spread: bool

    @property
    def sharing(self) -> int:
        """The ranks that share each expert by columns."""
        return self.ranks // self.groups


def require_sharing(model: ExpertModel, sharing: ExpertSharing) -> None:
    """Raise ConfigError unless each group gets an expert, and ranks that have rows of their own whole experts."""
    if sharing.ranks % sharing.groups:
        raise ConfigError(f"{sharing.ranks} ranks do not divide into {sharing.groups} groups of equal size")
    if sharing.groups > model.experts.number:
        raise ConfigError(f"{model.experts.number} experts cannot be divided between {sharing.groups} groups")
    if sharing.spread and sharing.sharing > 1:
        raise ConfigError(
            f"ranks with sequences of their own have whole experts: expert parallel must be {sharing.ranks}, not "
            f"{sharing.groups}"
        )


def experts_of_group(model: ExpertModel, groups: int) -> int:
    """Return the experts of the group that has most."""
    return max(map(len, partition(model.experts.number, groups)))


def columns_of_rank(model: ExpertModel, sharing: ExpertSharing) -> int:
    """Return the columns of an expert on the rank that has most."""
    return _columns(model.experts.intermediate, sharing.sharing)


def shared_columns(model: ExpertModel, sharing: ExpertSharing) -> int:
    """Return the columns of the shared experts on the rank that has most: all of them where rows are its own."""
    return _columns(model.experts.shared, 1 if sharing.spread else sharing.ranks)


def _columns(width: int, ranks: int) -> int:
    return max(len(shard(width, rank, ranks, FFN_UNIT).part) for rank in range(ranks)) if width else 0


def expected_experts(number: int, per_token: int, rows: int) -> float:
    """Return how many of ``number`` experts some rows go to, on average."""
    return number * (1 - (1 - per_token / number) ** rows)


def fullest_group(model: ExpertModel, groups: int, rows: int) -> GroupWork:
    """Return the work of the group that has most, by the equations above."""
    number, per_token = model.experts.number, model.experts.per_token
    own = experts_of_group(model, groups)
    share = own / number
    mean = rows * per_token * share
    variance = rows * per_token * (number - per_token) / (number - 1) * share * (1 - share)
    hit = expected_experts(number, per_token, rows) / number
    beyond = NormalDist().inv_cdf((groups - 3 / 8) / (groups + 1 / 4))
    most_rows = max(1.0, min(mean + beyond * math.sqrt(variance), rows * min(per_token, own)))
    most_experts = max(1.0, own * hit + beyond * math.sqrt(own * hit * (1 - hit) * (1 - share)))
    return GroupWork(min(most_experts, own, most_rows), most_rows, mean, rows * per_token / (hit * number))


def groups_of_row(model: ExpertModel, groups: float) -> float:
    """Return how many groups have one of the experts of a row, on average."""
    experts, per_token = model.experts, model.experts.per_token
    number, own = experts.number, experts.number / groups
    if groups >= experts.routing_groups:
        # it can reach no others than those which lie in the parts that it chooses
        part = experts.chosen_groups / experts.routing_groups
        number, groups = round(number * part), groups * part
    none = math.prod(max(0.0, number - own - taken) / (number - taken) for taken in range(per_token))
    return groups * (1 - none)


class ExpertLayer:
    """Prices the experts of a layer on the rank that has most.

    Args:
        model: its dimensions.
        sharing: how ranks divide the experts.
        calibration: constants of the kernels.
        product: the time and residual of a dense product of rows, outputs and inputs, in FP8 or not.
        collectives: constants of link and network.
        fp8: experts are in FP8.

    Raises:
        ConfigError: the experts cannot be divided so.
    """

    def __init__(
        self,
        model: ExpertModel,
        sharing: ExpertSharing,
        calibration: Calibration,
        product: Callable[[int, int, int, bool], Priced],
        collectives: CollectiveCosts,
        fp8: bool,
    ):
        require_sharing(model, sharing)
        self._model, self._sharing, self._fp8 = model, sharing, fp8
        self._calibration, self._product, self._collectives = calibration, product, collectives
        self._item = calibration.itemsize
        self._stand_in = STAND_IN if sharing.groups == 1 else STAND_IN_OF_GROUPS
        self._columns, self._shared = columns_of_rank(model, sharing), shared_columns(model, sharing)

    def parts(self, rows: int) -> Mapping[str, Priced]:
        """Return the time and the residual of each part, where a rank has ``rows`` rows before the router.

        The sum over ranks that share attention is not among them.
        """
        model, experts = self._model, self._model.experts
        hidden, ranks = model.hidden, self._sharing.ranks
        work = fullest_group(model, self._sharing.groups, rows * (ranks if self._sharing.spread else 1))
        choices = rows * experts.per_token * _CHOICE_BYTES
        scored = rows * 2 * experts.number * _SCORE_BYTES + choices
        moved = 2 * work.rows * hidden * self._item
        returned = (work.rows + rows) * hidden * self._item
        routed = one_after_another(
            self._pass(moved),
            self._grouped(work, 2 * self._columns, hidden),
            self._pass(work.rows * 3 * self._columns * self._item),
            self._grouped(work, hidden, self._columns),
            self._pass(returned),
        )
        parts = {
            "router": one_after_another(
                self._product(rows, experts.number, hidden, False), self._pass(scored), self._pass(2 * choices)
            ),
            "experts": routed._replace(residual=math.hypot(routed.residual, self._stand_in)),
        }
        if self._shared:
            outputs = 2 * self._shared + experts.shared_gate
            parts["shared"] = one_after_another(
                self._product(rows, outputs, hidden, self._fp8), self._product(rows, hidden, self._shared, self._fp8)
            )
        if self._sharing.spread:
            sent = rows * groups_of_row(model, ranks) * hidden * self._item * work.rows / work.mean_rows
            time_us = 2 * all_to_all_us(self._collectives, sent, ranks)
            parts["all_to_all"] = Priced(time_us, self._calibration.residual(LINK))
        return parts

    def _kernel(self, kind: str, work: KernelWork) -> Priced:
        return Priced(self._calibration.time_us(kind, work), self._calibration.residual(kind))

    def _pass(self, nbytes: float) -> Priced:
        return self._kernel("rows_pass", rows_pass(nbytes))

    def _grouped(self, work: GroupWork, outputs: int, inputs: int) -> Priced:
        """Return the time of a product with the weights of several experts.

        It has the constants of a few rows, as kernels for one row take one matrix, or of many where each expert has
        them. More rows never take less.
        """
        few_rows = self._calibration.few_rows
        weights = outputs * inputs * (1 if self._fp8 else self._item) * work.experts / 1e9
        operations = 2 * outputs * inputs / 1e9
        few = KernelWork(weights, min(work.rows, few_rows * work.experts) * operations)
        price = self._kernel(product_kind(few_rows, self._fp8, few_rows), few)
        if work.rows_of_expert <= few_rows:
            return price
        many = KernelWork(weights, work.rows * operations)
        price = max(price, self._kernel(product_kind(few_rows + 1, self._fp8, few_rows), many))
        return in_a_row(price, self._calibration, many, self._fp8)


def all_to_all_us(collectives: CollectiveCosts, nbytes: float, ranks: int) -> float:
    """Return the microseconds in which each rank sends a part of ``nbytes`` to every other.

    It is one step of one-shot. Between nodes, where no kernel of ours makes it, it is one step to all others.
    """
    shape = collectives.shape(ranks)
    work = registered()["one_shot"].forms[Op.ALL_TO_ALL].work(math.ceil(nbytes), shape, 1)
    return time_us(work, collectives.link, collectives.network_over(shape.nodes))


def layer_bytes(model: ExpertModel, sharing: ExpertSharing, item: int, quantization: str) -> int:
    """Return the bytes of the weights of a layer's experts and its router on the rank that has most.

    Args:
        item: bytes of a weight that is not quantized.
        quantization: ``fp8`` if experts take a byte a weight, and a float32 for each output.
    """
    experts, hidden = model.experts, model.hidden
    own, columns = experts_of_group(model, sharing.groups), columns_of_rank(model, sharing)
    shared = shared_columns(model, sharing)
    matrices = 3 * hidden * (own * columns + shared)
    outputs = own * (2 * columns + hidden) + (2 * shared + hidden if shared else 0)
    router = hidden * (experts.number + experts.shared_gate)
    return router * item + (matrices + 4 * outputs if quantization else matrices * item)


def expert_weight_bytes(model: ExpertModel, sharing: ExpertSharing, item: int, stages: int, quantization: str) -> int:
    """Return the bytes of weights on the rank that has most, as :func:`shotcast.models.memory_estimate.weight_bytes`.

    A rank with sequences of its own has all but the experts whole.
    """
    ranks = 1 if sharing.spread else sharing.ranks
    if model.latent is not None:
        attention = latent_bytes(model, model.latent, item, ranks, quantization)
    else:
        attention = attention_bytes(model, item, ranks, quantization)
    networks = [layer_bytes(model, sharing, item, quantization), network_bytes(model, item, ranks, quantization)]
    layers = [attention + networks[number in model.experts.dense_layers] for number in range(model.layers)]
    return most_of_stages(model, item, ranks, stages, layers)


def row_width(model: ExpertModel, sharing: ExpertSharing, rows: int) -> int:
    """Return the activations that a row of a step of this many takes in the experts of a layer, in elements."""
    work = fullest_group(model, sharing.groups, rows * (sharing.ranks if sharing.spread else 1))
    each = 2 * model.hidden + 3 * columns_of_rank(model, sharing)
    return math.ceil(work.rows / rows * each) + 3 * shared_columns(model, sharing)
