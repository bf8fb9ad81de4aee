"""The gap that `kvloom tune` proposes, and the price that it states."""

import msgspec

from kvloom.contract.config import EngineConfig
from kvloom.tuning.gap import propose_gap
from kvloom.tuning.steptime import StepTimes
from kvloom.tuning.tune import Workload

WORKLOAD = Workload(average_input=96, average_output=24, max_output=64)
CONFIG = EngineConfig(backend="fake", max_batch=8, max_tokens_per_step=4104, max_prefill_tokens=4096)
TIMES = StepTimes(
    base_s=0.002, few_token_s=0.0005, token_s=0.0004, sample_s=0.0001, kilopair_s=0.0, model="m", num_blocks=870,
    block_size=16, max_seq_len=2048,
)  # fmt: skip
DEAR_STEPS = msgspec.structs.replace(TIMES, base_s=0.2)  # one more step costs as much as 500 tokens


def test_the_default_where_it_costs_little():
    found = propose_gap(msgspec.structs.replace(TIMES, base_s=0.03), WORKLOAD, CONFIG, None)
    assert (found.key, found.value) == ("maxDecodeGap", -1)
    assert found.reason.startswith("three decode steps, 104 ms with a full batch; ")


def test_what_is_asked_for_with_its_price():
    free, short = propose_gap(TIMES, WORKLOAD, CONFIG, 0.0), propose_gap(DEAR_STEPS, WORKLOAD, CONFIG, 1.0)
    assert (free.value, free.reason) == (0.0, "as asked for; 100% of the throughput of 0")
    assert short.value == 1.0
    assert int(short.reason.removeprefix("as asked for; ").partition("%")[0]) < 90


def test_a_longer_one_where_the_default_costs_more():
    found = propose_gap(DEAR_STEPS, Workload(average_input=900, average_output=24, max_output=64), CONFIG, None)
    assert (found.value, found.reason) == (819.2, "4 decode steps; 100% of the throughput of 0")
