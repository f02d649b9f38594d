"""How fast a run should be: seconds of a step by kind of work, traffic by collective and link, scaling, what would help. Pure.

A step is `accumulation` micro-steps (launch/compute.py), the traffic that no computation hides, and the optimizer. All ranks are
alike, and as slow as the slowest.

Collectives are rings. An all_reduce of S bytes over N ranks puts 2(N-1)/N S on every edge of the ring, a gather or a
reduce_scatter (N-1)/N S. One edge of a node leads to the next node: the ranks of a node share its link without dividing it. The
time is bytes on an edge / bus bandwidth of the slowest edge (so nccl-tests defines it), plus the latency of the hops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from launch.compute import TORCH, Kernels, MicroStep, micro_step, necessary_flop_per_unit
from launch.memory import fit, largest_micro_batch
from launch.shape import Transformer
from launch.site import Link, Site, between_nodes
from launch.training import MOST_BATCH, ZERO_BUCKET, Training, divisors

BETWEEN, INSIDE, HOST = "between nodes", "inside a node", "host"
UNKNOWN_LINK = "the speed of a link is not known: r4090c preflight --full measures it"

HIDDEN_SHARE = 0.7
"""est.: of the backward pass, in which gradients travel unseen with overlap_comm: NCCL's kernels and the gradients' copies take
some of the card's processors and memory."""
STAGE3_SHARE = 0.5
"""Of the bus bandwidth, that gathers of ZeRO-3 get layer by layer, what its prefetch hides included. Fitted: LlamaFactory 3B on
four 4090s (bench/planning.py)."""
HOST_MEMORY_GBYTE_S = 100.0
"""est.: what the memory of a node gives to copies and to Adam on the CPU: 8 channels of DDR4; a desktop's two give a third."""
CORE_MEMORY_GBYTE_S = 8.0
"""est.: what one core moves through Adam."""
ADAM_MOVED_BYTES: Mapping[str, float] = {"adamw": 50.0, "adamw8bit": 34.0}
"""est.: through the card's memory a trained parameter: gradient, master copy and two moments read and written in FP32 (28),
the norm of the gradients and scaling (12), the copy in 16 bits (10); moments of 8 bits save 12 and take 4 more of scaling."""
ADAM_MEMORY_SHARE = 0.7
"""est.: of the memory's bandwidth, by many kernels one after the other."""
HOST_ADAM_MOVED_BYTES = 28.0
"""Through host memory a parameter: three FP32 values read and written, a gradient read (DeepSpeedCPUAdam fuses them)."""
HOST_GRADIENT_BYTES = 4
"""ZeRO-Offload keeps gradients in FP32 in host memory and copies those of every micro-step there."""
STAGE3_RATE_MIN_GBIT_S = 25.0
"""ZeRO-3 gathers all weights in every micro-step: over a 10 GbE overlay a step took 90 s instead of 4 (LlamaFactory#5014)."""
OUR_BUCKET_ELEMENTS = 50_000_000
"""reduce_bucket_size and allgather_bucket_size in ds_configs/ (zero3.json gathers otherwise and is silent about the second)."""
FAST_RATE_GBIT_S = (25.0, 100.0)
"""Networks that a what-if tries."""
WORTH = 1.02
"""est.: less than this is not told as a help: the prediction is not that exact."""
MOST_NODES = 16
"""As many as this tool is for."""
ACCUMULATION_WORTH = 0.05
"""est.: of a step, from which on traffic that accumulation does not save is worth a warning."""
POINTLESS_STEP_MIN_S = 0.1
"""est.: shorter steps are of recipes that try a cluster, like tiny; nobody waits for their result."""


@dataclass(frozen=True, slots=True)
class Stack:
    """The software that trains. `hides_stage3`: gathers of ZeRO-3 run beside the computation at full speed."""

    kernels: Kernels
    hidden_share: float = HIDDEN_SHARE
    stage3_share: float = STAGE3_SHARE
    hides_stage3: bool = False
    reuse_distance: float = 3e8
    """stage3_max_reuse_distance of ds_configs/zero3.json; DeepSpeed's default is 1e9."""


DEEPSPEED = Stack(TORCH)
"""What `train` runs."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of traffic of a step. `bytes_per_rank`: what a rank sends each time, on an edge of the ring or over PCIe.

    `seconds_per_step`: of all times together, whether hidden or not; None = the speed of the link is not known.
    """

    what: str
    collective: str
    link: str
    bytes_per_rank: float
    times_per_step: int
    seconds_per_step: float | None
    hidden_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a run should do. Times are seconds of one optimizer step; None = cannot be told (`assumptions` says why).

    `exposed_s`: traffic between ranks that nothing hides. `mfu`: necessary FLOP (without recomputation) against the dense peak.
    `scaling_efficiency`: E(n) = T(n) / (n T(1)), T(1) one node alone, every rank set as here, whether it fits or not.
    `parts`: where the time of a step goes, (name, seconds), the longest first.
    """

    step_s: float | None
    compute_s: float | None
    optimizer_s: float | None
    offload_s: float | None
    traffic: tuple[Traffic, ...]
    exposed_s: float | None
    units_per_s: float | None
    unit: str
    mfu: float | None
    scaling_efficiency: float | None
    assumptions: tuple[str, ...]
    parts: tuple[tuple[str, float], ...] = ()

    @property
    def traffic_s(self) -> float | None:
        """Seconds of traffic between ranks in a step, hidden or not."""
        told = [one.seconds_per_step for one in self.traffic if one.link != HOST]
        return None if None in told else sum(second for second in told if second is not None)


@dataclass(frozen=True, slots=True)
class Help:
    """A change that would make the run faster. `gain`: how many times as fast. `sets`: `--set` words, none for hardware."""

    change: str
    sets: tuple[str, ...]
    units_per_s: float
    gain: float


# --------------------------------------------------------------------------- collectives


def all_reduce_s(size_bytes: float, site: Site) -> float | None:
    """Return the seconds of one all_reduce of `size_bytes` over all ranks; None when the speed of a link is not known."""
    return _ring_s(size_bytes, site, rounds=2, messages=1)


def _ring_s(size_bytes: float, site: Site, rounds: int, messages: int, share: float = 1.0) -> float | None:
    """Return the seconds of `messages` collectives of `size_bytes` together; rounds: 2 all_reduce, 1 gather, reduce_scatter."""
    ranks, between = site.world, _between(site)
    if ranks == 1:
        return 0.0
    links = [link for link in (between, site.inside if site.ranks_per_node > 1 else None) if link is not None]
    if not links or any(link.busbw_gbyte_s is None for link in links):
        return None
    slowest_gbyte_s = min(link.busbw_gbyte_s for link in links if link.busbw_gbyte_s is not None)
    hops_us = (site.nodes - 1) * (between.latency_us if between else 0.0)
    hops_us += (ranks - site.nodes) * (site.inside.latency_us if site.inside else 0.0)
    wire_bytes = rounds * (ranks - 1) / ranks * size_bytes
    return wire_bytes / (slowest_gbyte_s * share * 1e9) + messages * rounds * hops_us / 1e6


def _between(site: Site) -> Link | None:
    return site.between if site.nodes > 1 else None


def _bound(site: Site) -> str:
    """Return which link bounds a ring over all ranks."""
    between = _between(site)
    if between is None:
        return INSIDE
    inside = site.inside if site.ranks_per_node > 1 else None
    if inside is None or inside.busbw_gbyte_s is None or between.busbw_gbyte_s is None:
        return BETWEEN
    return BETWEEN if between.busbw_gbyte_s <= inside.busbw_gbyte_s else INSIDE


def gathered_parameters(training: Training) -> int:
    """Return the parameters that ZeRO-3 divides and gathers: all of 16 bits. Quantized matrices stay whole on every rank."""
    if training.method in ("qlora", "int8") and isinstance(training.shape, Transformer):
        return training.shape.parameters - training.shape.linear_parameters + training.trainable_parameters
    return training.shape.parameters + (training.trainable_parameters if training.method != "full" else 0)


def _traffic(training: Training, site: Site, stack: Stack) -> Iterator[Traffic]:
    """Yield the traffic between ranks, nothing of it hidden yet.

    Gradients: stages 0 and 1 reduce once a step, 2 and 3 in every micro-step (DeepSpeed#2252), since no rank keeps all of them.
    Stage 1 and 2 all_reduce whole buckets and keep the own slice (use_multi_rank_bucket_allreduce, on by default), and gather the
    weights once after the optimizer. Stage 3 gathers weights forward and backward, and a third time for recomputation unless they
    may stay until the backward pass of the same layer, two layers' parameters later (stage3_max_reuse_distance).
    """
    if site.world == 1:
        return
    link, value, stage = _bound(site), training.parameter_bytes, training.stage
    edge = (site.world - 1) / site.world
    gradients = training.trainable_parameters * value
    often = training.accumulation if stage >= 2 else 1
    if stage == 3:
        weights = gathered_parameters(training) * value
        layers = training.shape.layers if isinstance(training.shape, Transformer) else 1
        share = 1.0 if stack.hides_stage3 else stack.stage3_share
        times = _gathers(training, stack) * training.accumulation
        seconds = _ring_s(weights, site, 1, layers, share)
        yield Traffic("weights, layer by layer", "all_gather", link, edge * weights, times, _times(seconds, times))
        seconds = _ring_s(gradients, site, 1, layers, share)
        yield Traffic("gradients", "reduce_scatter", link, edge * gradients, often, _times(seconds, often))
        return
    buckets = max(1, math.ceil(training.trainable_parameters / training.reduce_bucket_elements))
    seconds = _ring_s(gradients, site, 2, buckets)
    yield Traffic("gradients", "all_reduce", link, 2 * edge * gradients, often, _times(seconds, often))
    if stage:
        buckets = max(1, math.ceil(training.trainable_parameters / training.allgather_bucket_elements))
        seconds = _ring_s(gradients, site, 1, buckets)
        yield Traffic("new weights", "all_gather", link, edge * gradients, 1, seconds)


def _gathers(training: Training, stack: Stack) -> int:
    """Return how often ZeRO-3 gathers all weights in a micro-step."""
    shape = training.shape
    again = isinstance(shape, Transformer) and 2 * shape.layer_parameters > stack.reuse_distance
    return 3 if training.activation_checkpointing and again else 2


def _times(seconds: float | None, times: int) -> float | None:
    return None if seconds is None else seconds * times


def _hidden(one: Traffic, training: Training, stack: Stack, micro_steps_s: float, backward_s: float) -> Traffic:
    """Return the traffic with what runs unseen beside the computation: gradients beside the backward pass, if so set."""
    if one.seconds_per_step is None or one.what == "new weights":
        return one
    if training.stage == 3:
        return replace(one, hidden_s=min(one.seconds_per_step, micro_steps_s)) if stack.hides_stage3 else one
    if not training.overlap_comm:
        return one
    window_s = stack.hidden_share * backward_s * one.times_per_step / training.accumulation
    return replace(one, hidden_s=min(one.seconds_per_step, window_s))


def _offload(training: Training, site: Site, stack: Stack) -> Iterator[Traffic]:
    """Yield what goes between cards and host memory: gradients down every micro-step, new weights up, weights of stage 3 up."""
    if site.card is None:
        return
    gbyte_s = min(site.card.host_gbyte_s, HOST_MEMORY_GBYTE_S / site.ranks_per_node)
    own = training.trainable_parameters / (site.world if training.stage else 1)
    kinds = []
    if training.offload_optimizer:
        often = training.accumulation if training.stage >= 2 else 1
        kinds.append(("gradients to the host", own * HOST_GRADIENT_BYTES, often))
        if not training.offload_parameters:
            kinds.append(("new weights to the card", own * training.parameter_bytes, 1))
    if training.offload_parameters and training.stage == 3:
        share = gathered_parameters(training) * training.parameter_bytes / site.world
        kinds.append(("weights to the card", share, _gathers(training, stack) * training.accumulation))
    for what, size_bytes, times in kinds:
        yield Traffic(what, "copy", HOST, size_bytes, times, size_bytes * times / (gbyte_s * 1e9))


def _optimizer_s(training: Training, site: Site) -> float | None:
    """Return the seconds of the optimizer, which is bound by memory: the card's, or the host's where it is offloaded."""
    if training.offload_optimizer:
        gbyte_s = min(HOST_MEMORY_GBYTE_S, CORE_MEMORY_GBYTE_S * site.cores if site.cores else math.inf)
        return training.trainable_parameters / site.nodes * HOST_ADAM_MOVED_BYTES / (gbyte_s * 1e9)
    if site.card is None or site.card.memory_gbyte_s is None:
        return None
    own = training.trainable_parameters / (site.world if training.stage else 1)
    return own * ADAM_MOVED_BYTES[training.optimizer] / (site.card.memory_gbyte_s * 1e9 * ADAM_MEMORY_SHARE)


# --------------------------------------------------------------------------- the prediction


def predict(training: Training, site: Site, stack: Stack = DEEPSPEED, *, rank_units_per_s: float | None = None) -> Prediction:
    """Return how fast `training` should be on `site`.

    `rank_units_per_s`: what one rank was measured to do alone, in place of the computed speed; ranks on CPUs have no other.
    """
    found = _predict(training, site, stack, rank_units_per_s)
    if found.units_per_s is None:
        return found
    alone = found if site.nodes == 1 else _predict(training, site.with_nodes(1), stack, rank_units_per_s)
    if alone.units_per_s is None:  # several ranks on the CPUs of a node: the speed between them is not known
        return replace(found, scaling_efficiency=None)
    return replace(found, scaling_efficiency=found.units_per_s / (site.nodes * alone.units_per_s))


def _predict(training: Training, site: Site, stack: Stack, rank_units_per_s: float | None) -> Prediction:
    traffic = tuple(_traffic(training, site, stack))
    micro = None if site.card is None or rank_units_per_s is not None else micro_step(training, site.card, stack.kernels)
    if rank_units_per_s is not None:
        compute_s = training.accumulation * training.units_per_micro_batch / rank_units_per_s
        optimizer_s = 0.0  # what was measured has it in it
    elif micro is not None:
        compute_s, optimizer_s = training.accumulation * micro.seconds, _optimizer_s(training, site) or 0.0
    else:
        return _unknown(training, site, traffic, _why_unknown(site))
    backward_s = compute_s * _backward_share(training)
    traffic = tuple(_hidden(one, training, stack, compute_s, backward_s) for one in traffic)
    host = tuple(_offload(training, site, stack)) if micro is not None else ()
    copied_s = sum(one.seconds_per_step or 0.0 for one in host)
    hides_s = stack.hidden_share * compute_s if training.offload_parameters or training.overlap_comm else 0.0
    offload_s = max(0.0, copied_s - hides_s)
    if any(one.seconds_per_step is None for one in traffic):
        return _unknown(training, site, (*traffic, *host), UNKNOWN_LINK)
    exposed_s = sum((one.seconds_per_step or 0.0) - one.hidden_s for one in traffic)
    step_s = compute_s + optimizer_s + offload_s + exposed_s
    units = site.world * training.accumulation * training.units_per_micro_batch
    peak = None
    if site.card is not None:
        peak = site.card.fp32_tflops if training.precision == "fp32" else site.card.bf16_tflops
    mfu = units * necessary_flop_per_unit(training) / step_s / (site.world * peak * 1e12) if peak is not None else None
    return Prediction(
        step_s=step_s,
        compute_s=compute_s,
        optimizer_s=optimizer_s,
        offload_s=offload_s,
        traffic=(*traffic, *host),
        exposed_s=exposed_s,
        units_per_s=units / step_s,
        unit=training.unit,
        mfu=mfu,
        scaling_efficiency=1.0,
        assumptions=tuple(_assumptions(training, site, stack, rank_units_per_s)),
        parts=tuple(_parts(training, micro, compute_s, optimizer_s, offload_s, exposed_s)),
    )


def _backward_share(training: Training) -> float:
    """Return the share of a micro-step in which gradients become ready: 2 of 3, recomputation counts as backward (3 of 4)."""
    return 3 / 4 if training.activation_checkpointing else 2 / 3


def _unknown(training: Training, site: Site, traffic: tuple[Traffic, ...], why: str) -> Prediction:
    told = [one.seconds_per_step for one in traffic if one.link != HOST]
    exposed_s = None if None in told else sum(second for second in told if second is not None)
    links = tuple(_links_told(site))
    return Prediction(None, None, None, None, traffic, exposed_s, None, training.unit, None, None, (why, *links))


def _why_unknown(site: Site) -> str:
    if site.card is None:
        return "ranks on CPUs: no speed is known before a run measured it"
    return f"the peaks of {site.card.name} are not in launch/site.py"


def _parts(
    training: Training, micro: MicroStep | None, compute_s: float, optimizer_s: float, offload_s: float, exposed_s: float
) -> list[tuple[str, float]]:
    often = training.accumulation
    kinds: list[tuple[str, float]] = [("computation as measured", compute_s)]
    if micro is not None:
        kinds = [
            ("matrix multiplications", often * micro.matmul_s),
            ("attention", often * micro.attention_s),
            ("norms, activations, loss", often * micro.elementwise_s),
            ("recomputation", often * micro.recompute_s),
            ("dequantization", often * micro.dequantize_s),
            ("launching kernels", often * micro.idle_s),
        ]
    kinds += [("traffic between ranks", exposed_s), ("traffic to the host", offload_s), ("optimizer", optimizer_s)]
    return sorted(((name, seconds) for name, seconds in kinds if seconds > 0), key=lambda one: -one[1])


def _assumptions(training: Training, site: Site, stack: Stack, rank_units_per_s: float | None) -> Iterator[str]:
    if rank_units_per_s is not None:
        yield f"{rank_units_per_s:g} {training.unit}/s of one rank, as measured"
    elif site.card is not None:
        yield f"{stack.kernels.name}, on {site.card.name}s that keep their clock (no power cap, cool)"
        if isinstance(training.shape, Transformer):
            yield "sequences are packed: every token counts"
        else:
            yield "est.: convolutions were never compared with a measurement"
        if training.method in ("qlora", "int8"):
            yield f"est.: the cost of {'nf4' if training.method == 'qlora' else 'LLM.int8'} was never compared with a measurement"
    yield from _links_told(site)
    if site.world > 1 and training.stage < 3:
        shown = (
            f"up to {stack.hidden_share:.0%} of the backward pass" if training.overlap_comm else "nothing (overlap_comm is off)"
        )
        yield f"gradient traffic is hidden by {shown}"
    if site.world > 1 and training.stage == 3:
        yield f"ZeRO-3's gathers get {stack.stage3_share:.0%} of the bus bandwidth (fitted to one published run)"
    if training.offload_optimizer:
        yield f"est.: host memory of {HOST_MEMORY_GBYTE_S:g} GB/s; two channels of a desktop board give a third"


def _links_told(site: Site) -> Iterator[str]:
    for where, link in ((BETWEEN, _between(site)), (INSIDE, site.inside if site.ranks_per_node > 1 else None)):
        if link is not None:
            speed = "not known" if link.busbw_gbyte_s is None else f"{link.busbw_gbyte_s:.3g} GB/s"
            yield f"all_reduce {where}: {speed} ({link.origin})"


# --------------------------------------------------------------------------- what to do about it


def pointless(training: Training, site: Site) -> str | None:
    """Return why a run on `site` is not worth it, with the seconds of traffic; None when it is, or when nothing is known.

    It is pointless when fewer nodes do as much, or where none do that hold the model, when all do less than one would.
    """
    found = predict(training, site)
    if site.nodes == 1 or found.units_per_s is None or found.step_s is None or found.exposed_s is None:
        return None
    if found.step_s < POINTLESS_STEP_MIN_S:
        return None
    told = _traffic_told(training, site, found)
    for nodes in fewer_than(site.nodes):
        fewer = site.with_nodes(nodes)
        other = predict(training, fewer)
        if other.units_per_s is None or other.units_per_s < found.units_per_s or not fit(training, fewer).fits:
            continue
        ratio = found.units_per_s / other.units_per_s
        name = "one" if nodes == 1 else str(nodes)
        return f"{told}; {site.nodes} nodes give {ratio:.2g} × what {name} {'gives' if nodes == 1 else 'give'}"
    work = (found.scaling_efficiency or 0.0) * site.nodes
    if work < 1:
        return f"{told}; {site.nodes} nodes do {work:.2g} × what one would, could it hold the model"
    return None


def fewer_than(nodes: int) -> Iterator[int]:
    """Yield smaller numbers of nodes worth a look: all up to MOST_NODES, above that powers of two."""
    yield from (number for number in range(1, nodes) if number <= MOST_NODES or number.bit_count() == 1)


def _traffic_told(training: Training, site: Site, found: Prediction) -> str:
    link = site.between
    rate = f"{link.rate_gbit_s:g} Gbit/s" if link and link.rate_gbit_s else f"{link.busbw_gbyte_s:.3g} GB/s" if link else ""
    return f"{training.name} over {rate}: {found.exposed_s:.3g} s of traffic per step against {found.compute_s:.3g} s of compute"


def warnings(training: Training, site: Site) -> tuple[str, ...]:
    """Return what is known to go badly, though it is not refused."""
    found = []
    between = _between(site)
    if between is not None and training.stage == 3 and (between.rate_gbit_s or math.inf) < STAGE3_RATE_MIN_GBIT_S:
        found.append(
            f"ZeRO-3 gathers all weights in every micro-step: below {STAGE3_RATE_MIN_GBIT_S:g} Gbit/s it collapses "
            f"(4 s a step became 90 over 10 GbE, LlamaFactory#5014); here {between.rate_gbit_s:g}"
        )
    told = predict(training, site)
    if training.stage == 2 and training.accumulation > 1 and told.step_s and told.exposed_s:
        again_s = sum(one.seconds_per_step or 0.0 for one in told.traffic if one.times_per_step > 1 and one.link != HOST)
        if min(again_s, told.exposed_s) * (1 - 1 / training.accumulation) < ACCUMULATION_WORTH * told.step_s:
            return tuple(found)
        found.append(
            f"ZeRO-2 reduces gradients in every micro-step (DeepSpeed#2252): {training.accumulation} times a step; "
            "a larger micro-batch instead of accumulation saves traffic, accumulation does not"
        )
    return tuple(found)


def helps(training: Training, site: Site) -> tuple[Help, ...]:
    """Return the changes that would make the run faster, the best first. Those of the training fit; the global batch stays."""
    now = predict(training, site)
    if now.units_per_s is None:
        return ()
    found = []
    for change, sets, then in _changes(training, largest_micro_batch(training, site) or 1):
        if fit(then, site).fits:
            found.append(_help(change, sets, now, predict(then, site)))
    between = _between(site)
    if between is not None and between.rate_gbit_s is not None:
        for rate in FAST_RATE_GBIT_S:
            if rate > between.rate_gbit_s:
                link = between_nodes("roce", rate)
                faster = predict(training, replace(site, between=link))
                found.append(_help(f"a network of {rate:g} Gbit/s (RoCE)", (), now, faster))
    best = sorted((one for one in found if one.gain >= WORTH), key=lambda one: -one.gain)
    return tuple(best)


def _help(change: str, sets: tuple[str, ...], now: Prediction, then: Prediction) -> Help:
    assert now.units_per_s is not None and then.units_per_s is not None
    return Help(change, sets, then.units_per_s, then.units_per_s / now.units_per_s)


def _changes(training: Training, largest: int) -> Iterator[tuple[str, tuple[str, ...], Training]]:
    """Yield (what to change, its --set words, the training then); `largest`: micro-batch that fits."""
    for factor in divisors(training.accumulation):
        if 1 < factor <= min(largest, MOST_BATCH) // training.micro_batch:
            micro, often = training.micro_batch * factor, training.accumulation // factor
            sets = (f"micro_batch={micro}", f"gradient_accumulation={often}")
            yield f"micro-batch {micro} (same global batch)", sets, replace(training, micro_batch=micro, accumulation=often)
    if training.activation_checkpointing:
        then = replace(training, activation_checkpointing=False)
        yield "no activation checkpointing", ("activation_checkpointing=false",), then
    if not training.overlap_comm and training.stage < 3:
        then = replace(training, overlap_comm=True)
        yield "overlap_comm in a DeepSpeed JSON of your own (--set ds_config=/FILE; a version with #7805, #7965, #8080)", (), then
    if training.stage == 2 and not training.offload_optimizer:
        yield "ZeRO-1: gradients travel once a step", ("ds_config=zero1.json",), _under_ours(training, 1)
    if training.stage == 3:
        then = _under_ours(training, 2, offload_optimizer=training.offload_optimizer)
        name = "zero2_offload.json" if training.offload_optimizer else "zero2.json"
        yield "ZeRO-2: weights are not gathered", (f"ds_config={name}",), then
    if training.offload_optimizer:
        yield "no offload", (f"ds_config=zero{training.stage}.json",), _under_ours(training, training.stage)
    if training.method in ("qlora", "int8"):
        yield "LoRA over weights of 16 bits", ("method=lora",), replace(training, method="lora")


def _under_ours(training: Training, stage: int, *, offload_optimizer: bool = False) -> Training:
    """Return the training under our DeepSpeed configuration of `stage`, whose other keys may not be those of the user's own."""
    return replace(
        training,
        stage=stage,
        offload_optimizer=offload_optimizer,
        offload_parameters=False,
        overlap_comm=stage == 3,
        reduce_bucket_elements=OUR_BUCKET_ELEMENTS,
        allgather_bucket_elements=OUR_BUCKET_ELEMENTS if stage < 3 else ZERO_BUCKET,
    )
