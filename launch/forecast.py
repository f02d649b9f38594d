"""What a run will need and how fast it should be, in one answer: memory, traffic, time, scaling, what would help. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launch.alternatives import Alternative
from launch.memory import Fit, fit, largest_micro_batch
from launch.perf import Help, Prediction, fewer_than, helps, pointless, predict, warnings
from launch.site import Site
from launch.training import Training
from r4090c.errors import CheckFailed


@dataclass(frozen=True, slots=True)
class Point:
    """The same training on another number of nodes, where the batch grows with them. None = cannot be told."""

    nodes: int
    fits: bool
    units_per_s: float | None
    scaling_efficiency: float | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """What `training` needs on `site`. `largest_micro_batch` None: not even one fits. `pointless`: why it is not worth it."""

    training: Training
    site: Site
    fit: Fit
    largest_micro_batch: int | None
    prediction: Prediction
    pointless: str | None
    warnings: tuple[str, ...] = ()

    @property
    def worth_it(self) -> bool:
        """True when the run fits and has a point."""
        return self.fit.fits and self.pointless is None


def forecast(training: Training, site: Site) -> Forecast:
    """Return what `training` needs on `site`, and how fast it should be there."""
    return Forecast(
        training,
        site,
        fit(training, site),
        largest_micro_batch(training, site),
        predict(training, site),
        pointless(training, site),
        warnings(training, site),
    )


def scaling(training: Training, site: Site) -> tuple[Point, ...]:
    """Return the rate on 1, 2, 4, … nodes up to those of `site`, and on them."""
    counts = [1]
    while 2 * counts[-1] < site.nodes:
        counts.append(2 * counts[-1])
    return tuple(_point(training, site, nodes) for nodes in dict.fromkeys([*counts, site.nodes]))


def _point(training: Training, site: Site, nodes: int) -> Point:
    part = site.with_nodes(nodes)
    told = predict(training, part)
    return Point(nodes, fit(training, part).fits, told.units_per_s, told.scaling_efficiency)


def fewer_nodes(one: Forecast) -> Point | None:
    """Return the fastest smaller number of nodes, where that does as much as all of them; None of a run that is not pointless."""
    rate = one.prediction.units_per_s
    if one.pointless is None or not one.fit.fits or rate is None:
        return None
    fewer = [_point(one.training, one.site, nodes) for nodes in fewer_than(one.site.nodes)]
    good = [point for point in fewer if point.fits and (point.units_per_s or 0.0) >= rate]
    return max(good, key=lambda point: (point.units_per_s or 0.0, -point.nodes), default=None)


def useful(one: Forecast) -> tuple[Help, ...]:
    """Return what would make the run faster, the best first; nothing of one that does not fit: its alternatives tell more."""
    return helps(one.training, one.site) if one.fit.fits else ()


def refusal(one: Forecast, next_command: str) -> CheckFailed | None:
    """Return the error that tells, with the arithmetic, why the run is not to be started; None when it is worth it."""
    if one.worth_it:
        return None
    culprit = f"{one.training.name} on {one.site.name}"
    if not one.fit.fits:
        return CheckFailed(culprit, "\n  ".join(["does not fit", *one.fit.reasons]), "", next_command)
    return CheckFailed(culprit, f"pointless {told_pointless(one)}", "", next_command)


def told_pointless(one: Forecast) -> str:
    """Return why the run is not worth it without its name, which stands before it already; "" when it is."""
    return (one.pointless or "").removeprefix(f"{one.training.name} ")


# --------------------------------------------------------------------------- as JSON; the keys carry units


def forecast_json(one: Forecast) -> dict[str, Any]:
    """Return the forecast as `plan.json` and `r4090c plan --json` hold it."""
    return {
        "fits": one.fit.fits,
        "pointless": one.pointless,
        "reasons": list(one.fit.reasons),
        **memory_json(one.fit),
        "largest_micro_batch": one.largest_micro_batch,
        "predicted": prediction_json(one.prediction),
        "warnings": list(one.warnings),
        "assumptions": list(one.prediction.assumptions),
        "training": training_json(one.training),
        "site": asdict(one.site),
    }


def memory_json(told: Fit) -> dict[str, Any]:
    """Return what a fit says, by part, in GiB (2^30 bytes)."""
    return {
        "per_gpu_gib": dict(told.memory.per_gpu_gib),
        "per_gpu_total_gib": told.memory.total_gib,
        "card_gib": told.room_gib,
        "host_gib": dict(told.memory.host_gib),
        "host_total_gib": told.memory.host_total_gib,
        "host_available_gib": told.host_room_gib,
        "arithmetic": dict(told.memory.arithmetic),
        "host_arithmetic": dict(told.memory.host_arithmetic),
    }


def prediction_json(told: Prediction) -> dict[str, Any]:
    """Return a prediction; seconds are those of one optimizer step, null = cannot be told."""
    return {
        "step_s": told.step_s,
        "compute_s": told.compute_s,
        "optimizer_s": told.optimizer_s,
        "offload_s": told.offload_s,
        "exposed_traffic_s": told.exposed_s,
        "traffic_s": told.traffic_s,
        f"{told.unit}_per_s": told.units_per_s,
        "mfu": told.mfu,
        "scaling_efficiency": told.scaling_efficiency,
        "time_goes_to_s": dict(told.parts),
        "traffic": [asdict(one) for one in told.traffic],
    }


def training_json(training: Training) -> dict[str, Any]:
    """Return what is trained and how, without the model's shape."""
    told = asdict(training)
    del told["shape"]
    return {
        **told,
        "parameters": training.shape.parameters,
        "trainable_parameters": training.trainable_parameters,
    }


def scaling_json(points: Sequence[Point], unit: str) -> list[dict[str, Any]]:
    """Return the rates on other numbers of nodes."""
    return [
        {
            "nodes": one.nodes,
            "fits": one.fits,
            f"{unit}_per_s": one.units_per_s,
            "scaling_efficiency": one.scaling_efficiency,
        }
        for one in points
    ]


def help_json(one: Help, unit: str) -> dict[str, Any]:
    """Return one change that would help."""
    return {"change": one.change, "sets": list(one.sets), f"{unit}_per_s": one.units_per_s, "gain": one.gain}


def alternative_json(one: Alternative, command: str) -> dict[str, Any]:
    """Return an alternative with the command that plans it."""
    return {
        "sets": list(one.sets),
        "command": command,
        "changes": list(one.changes),
        "fits": one.fit.fits,
        "per_gpu_total_gib": one.fit.memory.total_gib,
        "host_total_gib": one.fit.memory.host_total_gib,
        "predicted": prediction_json(one.prediction),
    }


def told_training(training: Training) -> str:
    """Return in a few words what is trained and how."""
    stage = f"ZeRO-{training.stage}" if training.stage else "no ZeRO"
    off = " and ".join(
        name for name, it in (("optimizer", training.offload_optimizer), ("weights", training.offload_parameters)) if it
    )
    of = f" of {training.sequence_length} tokens" if training.unit == "tokens" else f" {training.unit}"
    often = f", accumulated {training.accumulation} times" if training.accumulation > 1 else ""
    method = METHOD_NAMES[training.method]
    batch = f"micro-batch {training.micro_batch}{of}{often}"
    parts = [method, stage + (f", {off} in host memory" if off else ""), batch, training.precision]
    return ", ".join([*parts, "activation checkpointing"] if training.activation_checkpointing else parts)


METHOD_NAMES: Mapping[str, str] = {"full": "all weights", "lora": "LoRA", "int8": "LoRA over 8-bit weights", "qlora": "QLoRA"}
