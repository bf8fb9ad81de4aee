"""The part of a layer's program for mixtures of experts."""

import numpy as np

from kvloom.checkpoints.families.spec import DecoderSpec, Experts
from kvloom.rank.kernels import cpu_abi
from kvloom.rank.kernels.backend import Floats
from kvloom.rank.kernels.cpu_abi import Mixture
from kvloom.rank.kernels.program import GATES, PANEL, PANEL_HALF, Program

_ROW_PAD = 64  # a router's rows are padded to a multiple of so many floats (cpu/layout.hpp, kPad)


def declare_experts(program: Program, spec: DecoderSpec, at: str) -> int:
    """Declare norm, router, experts and residual addition of the layer whose tensors begin with `at`. Returns the bytes
    of experts that a token does not read.
    """
    experts, gate = spec.experts, GATES[spec.activation]
    assert experts is not None, "a layer has experts"
    names = [f"{at}experts.{index}." for index in range(experts.count)]
    shared_up = program.up_names(at + "shared_") if experts.shared else []
    program.share(*(up for name in names for up in program.up_names(name)), *shared_up)
    program.share(*(name + "down" for name in names))
    is_joint = all(program.is_joint(name) for name in names)
    before, linears = sum(program.measure()), []
    for name in names:
        linears += [
            program.gate_up(name, experts.intermediate, spec.hidden, is_joint),
            program.linear(spec.hidden, experts.intermediate, (name + "down", 0)),
        ]
    expert_bytes = sum(program.measure()) - before
    mixture = program.mixture(_mixture(program, spec, at, linears[0], is_joint))
    norm = program.vector(at + ("experts_norm" if experts.has_dense else "mlp_norm"))
    program.emit(cpu_abi.ROUTE, layer=mixture, linear=linears[0], vector=norm)
    shared = _declare_shared_up(program, spec, experts, at) if experts.shared else cpu_abi.NONE
    if is_joint:
        program.emit(cpu_abi.EXPERTS_UP, layer=mixture, epilogue=gate)
        program.emit(cpu_abi.EXPERTS_DOWN, layer=mixture, linear=linears[1], source=cpu_abi.FROM_MLP)
    else:
        program.emit(cpu_abi.EXPERTS_UP, layer=mixture, epilogue=cpu_abi.TO_QKV)
        down = {"linear": linears[1], "epilogue": gate, "source": cpu_abi.FROM_GATE_UP}
        program.emit(cpu_abi.EXPERTS_DOWN, layer=mixture, **down)
    if experts.shared:
        is_joint = program.is_joint(at + "shared_")
        apart = {"source": cpu_abi.FROM_MLP} if is_joint else {"source": cpu_abi.FROM_GATE_UP, "epilogue": gate}
        end = cpu_abi.GATED_RESIDUAL if experts.weighs_shared else cpu_abi.RESIDUAL
        program.emit(cpu_abi.QUANT, linear=shared, **apart)
        program.emit(cpu_abi.LINEAR, linear=shared, epilogue=end)
    return expert_bytes - expert_bytes * experts.per_token // experts.count


def _declare_shared_up(program: Program, spec: DecoderSpec, experts: Experts, at: str) -> int:
    """Gate and up of the shared expert, which reads what the router has quantised. Returns its down projection."""
    gate, name = GATES[spec.activation], at + "shared_"
    is_joint = program.is_joint(name)
    gate_up = program.gate_up(name, experts.shared, spec.hidden, is_joint)
    down = program.linear(spec.hidden, experts.shared, (name + "down", 0))
    program.emit(cpu_abi.LINEAR, linear=gate_up, epilogue=gate if is_joint else cpu_abi.TO_QKV)
    return down


def _mixture(program: Program, spec: DecoderSpec, at: str, first: int, is_joint: bool) -> Mixture:
    experts = spec.experts
    assert experts is not None, "a layer has experts"
    bias: dict[str, int] = {"router_bias": cpu_abi.NONE, "up_bias": cpu_abi.NONE, "down_bias": cpu_abi.NONE}
    if experts.has_bias:
        bias = {
            "router_bias": program.vector(at + "router_bias"),
            "up_bias": program.values(_up_bias(program, experts, at, is_joint)),
            "down_bias": program.values(_padded(_biases(program, experts, at, "down"), PANEL)),
        }
    shared = program.vector(at + "shared_router") if experts.shared and experts.weighs_shared else cpu_abi.NONE
    correction = program.vector(at + "router_correction") if experts.has_correction else cpu_abi.NONE
    router = program.values(_padded(program.weights.tensor(at + "router").float32(), _ROW_PAD))
    counts = {"num_experts": experts.count, "per_token": experts.per_token, "weighs_chosen": experts.weighs_chosen}
    choice = {"is_sigmoid": experts.scores == "sigmoid", "groups": experts.groups, "kept_groups": experts.kept_groups}
    choice["group_best"] = experts.group_best
    norm = cpu_abi.NONE
    if experts.has_dense:
        norm = program.values(program.weights.tensor(at + "router_norm").float32() * np.float32(spec.hidden**-0.5))
    own = {"router": router, "shared": shared, "correction": correction, "router_norm": norm}
    own["to_branch"] = experts.has_dense
    return Mixture(first=first, scale=experts.scale, **own, **counts, **choice, **bias)


def _biases(program: Program, experts: Experts, at: str, part: str) -> Floats:
    """[experts, rows]."""
    names = (f"{at}experts.{index}.{part}_bias" for index in range(experts.count))
    return np.stack([program.weights.tensor(name).float32() for name in names])


def _up_bias(program: Program, experts: Experts, at: str, is_joint: bool) -> Floats:
    """Biases of gate and up, in the order of their panels."""
    parts = [_padded(_biases(program, experts, at, part), PANEL_HALF if is_joint else PANEL) for part in ("gate", "up")]
    if not is_joint:
        return np.concatenate(parts, 1)
    halves = [part.reshape(experts.count, -1, PANEL_HALF) for part in parts]
    return np.stack(halves, 2).reshape(experts.count, -1)


def _padded(rows: Floats, unit: int) -> Floats:
    """`rows`, each padded with zeros to a multiple of `unit`."""
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % unit)))
