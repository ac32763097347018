"""Solution of exercise 7."""

from __future__ import annotations

from typing import NamedTuple


class Machine(NamedTuple):
    bandwidth: float
    flops: float


class Model(NamedTuple):
    weight_bytes: float
    num_weights: float


def step_seconds(model: Model, machine: Machine, batch: int) -> float:
    reading = model.weight_bytes / machine.bandwidth
    computing = batch * 2 * model.num_weights / machine.flops
    return max(reading, computing)


def speed_up(model: Model, machine: Machine, batch: int) -> float:
    return batch * step_seconds(model, machine, 1) / step_seconds(model, machine, batch)


def turning_point(model: Model, machine: Machine) -> float:
    reading = model.weight_bytes / machine.bandwidth
    return reading * machine.flops / (2 * model.num_weights)
