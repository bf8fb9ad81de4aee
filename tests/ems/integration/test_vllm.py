"""EMSConnector over a stub of vLLM 0.32's interface, against a real agent; tests/compat has a test in vLLM itself."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from ems.integration.parts import split_blocks
from ems.integration.prefix import Chain
from ems.integration.settings import Settings, model_fingerprint
from kvloom.pool.agent import Agent
from tests.support.pool.agents import blocks_of, running_agent
from tests.support.pool.stores import shortened
from tests.support.vllm.engine import Engine, engine
from tests.support.vllm.stub import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    FakeRequest,
    FullAttentionSpec,
    KVConnectorRole,
    MambaSpec,
    Step,
    generate_block_hash_extra_keys,
    kv_cache_config,
    stubbed_vllm,
    vllm_config,
)
from tests.support.waiting import until

PROMPT = list(range(100, 100 + 4 * BLOCK_SIZE + 1))  # four full blocks and a token


@pytest.fixture
def first(agent: Agent) -> Iterator[Engine]:
    """An engine that has computed PROMPT in blocks 0 to 4."""
    with engine(agent.config.socket) as running:
        running.compute(FakeRequest("a", list(PROMPT)), [0, 1, 2, 3, 4])
        yield running


def test_a_new_engine_loads_what_another_computed(agent, first):
    with engine(agent.config.socket, seed=2) as second:
        request = FakeRequest("b", list(PROMPT))
        assert second.matched(request) == (4 * BLOCK_SIZE, True)
        assert second.load(request, [9, 8, 7, 6, 5], 4 * BLOCK_SIZE) == set()
        for mine, theirs in zip([9, 8, 7, 6], range(4), strict=True):
            assert torch.equal(second.bytes_of(mine), first.bytes_of(theirs))


def test_only_what_the_engine_lacks_is_loaded(agent, first):
    with engine(agent.config.socket, seed=2) as second:
        request, before = FakeRequest("b", list(PROMPT)), second.bytes_of(9).clone()
        assert second.matched(request, 2 * BLOCK_SIZE) == (2 * BLOCK_SIZE, True)
        second.load(request, [9, 8, 7, 6, 5], 2 * BLOCK_SIZE)
        assert torch.equal(second.bytes_of(9), before)
        assert torch.equal(second.bytes_of(7), first.bytes_of(2))


@pytest.mark.parametrize(
    "changes",
    [
        {"all_token_ids": [7, *PROMPT[1:]]},
        {"all_token_ids": PROMPT[:BLOCK_SIZE]},  # its last token must be computed, so no full block is left
        {"cache_salt": "mine"},
        {"lora_request": SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="/does/not/exist")},
        {"skip_reading_prefix_cache": True},
    ],
)
def test_other_prefixes_match_nothing(first, changes):
    request = FakeRequest(**{"request_id": "b", "all_token_ids": list(PROMPT), **changes})
    assert first.matched(request) == (0, False)


@pytest.mark.parametrize("changes", [{"extra": {"model_id": "other"}}, {"kv_role": "kv_producer"}])
def test_other_models_and_producers_load_nothing(agent, first, changes):
    with engine(agent.config.socket, seed=2, **changes) as second:
        assert second.matched(FakeRequest("b", list(PROMPT))) == (0, False)


def test_a_consumer_saves_nothing(agent):
    with engine(agent.config.socket, kv_role="kv_consumer") as consumer:
        consumer.compute(FakeRequest("a", list(PROMPT)), [0, 1, 2, 3, 4])
        assert consumer.matched(FakeRequest("b", list(PROMPT))) == (0, False)


def test_generated_tokens_are_saved_once_they_are_known(agent):
    with engine(agent.config.socket) as running:
        request = FakeRequest("a", list(PROMPT))
        running.allocate(request, [0, 1, 2, 3, 4], 0)
        running.step(Step(new=[(request, [0, 1, 2, 3, 4], 0)], counts={"a": len(PROMPT)}))
        computed = len(PROMPT)
        while computed < 6 * BLOCK_SIZE:
            request.all_token_ids.append(computed)
            blocks = [computed // BLOCK_SIZE] if computed % BLOCK_SIZE == 0 else []
            running.step(Step(running={"a": (blocks, computed)}, counts={"a": 1}))
            computed += 1
        running.finish(request)
        asked = FakeRequest("b", [*request.all_token_ids, 1])
        assert running.matched(asked) == (6 * BLOCK_SIZE, True)


def test_guesses_that_the_scheduler_does_not_know_yet_are_not_saved(agent):
    with engine(agent.config.socket) as running:
        request = FakeRequest("a", PROMPT[:BLOCK_SIZE])
        running.allocate(request, [0, 1], 0)
        running.step(Step(new=[(request, [0, 1], 0)], counts={"a": 2 * BLOCK_SIZE}))
        running.finish(request)
        assert running.matched(FakeRequest("b", list(PROMPT))) == (BLOCK_SIZE, True)


def test_a_damaged_block_is_reported_and_not_asked_for_again(agent, first):
    pool = agent.node.pools()[0]
    for entry in blocks_of(pool)[2:3]:
        pool.view(entry.offset, entry.length)[5] ^= 1
    with engine(agent.config.socket, seed=2) as second:
        request = FakeRequest("b", list(PROMPT))
        assert second.matched(request) == (4 * BLOCK_SIZE, True)
        assert second.load(request, [9, 8, 7, 6, 5], 4 * BLOCK_SIZE) == {7, 6}
        assert torch.equal(second.bytes_of(8), first.bytes_of(1))
        assert second.matched(request, 2 * BLOCK_SIZE) == (0, False)


def test_a_block_counts_when_all_ranks_have_it(agent):
    with engine(agent.config.socket, world_size=2) as two:
        two.compute(FakeRequest("a", list(PROMPT)), [0, 1, 2, 3, 4])
        with engine(agent.config.socket, seed=7, world_size=2) as other:
            request = FakeRequest("b", list(PROMPT))
            assert other.matched(request) == (4 * BLOCK_SIZE, True)
            assert other.load(request, [5, 6, 7, 8, 9], 4 * BLOCK_SIZE) == set()
            for rank in range(2):
                assert torch.equal(other.bytes_of(6, rank), two.bytes_of(1, rank))
        shortened(agent.node.pools()[0])  # of one rank's chain
        assert two.matched(FakeRequest("c", list(PROMPT))) == (3 * BLOCK_SIZE, True)


def test_a_preempted_request_lets_go_of_its_blocks_after_its_saves(agent):
    with engine(agent.config.socket) as running:
        request = FakeRequest("a", list(PROMPT))
        running.allocate(request, [0, 1, 2, 3, 4], 0)
        running.step(Step(new=[(request, [0, 1, 2, 3, 4], 0)], counts={"a": len(PROMPT)}))
        true = [running.bytes_of(block).clone() for block in range(4)]
        running.step(Step(preempted={"a"}))
        for cache in running.caches[0].values():
            cache.zero_()
        assert running.scheduler.request_finished(request, [])[0] is False
        other = FakeRequest("b", list(PROMPT))
        assert running.matched(other) == (4 * BLOCK_SIZE, True)
        running.load(other, [5, 6, 7, 8, 9], 4 * BLOCK_SIZE)
        assert all(torch.equal(running.bytes_of(5 + i), true[i]) for i in range(4))


def test_without_an_agent_everything_is_computed(tmp_path):
    with engine(tmp_path / "nobody.sock", extra={"timeout_ms": 50}) as alone:
        request = FakeRequest("a", list(PROMPT))
        assert alone.matched(request) == (0, False)
        alone.compute(request, [0, 1, 2, 3, 4])


def test_an_agent_that_dies_while_loading_is_a_failed_load(agent, first):
    with engine(agent.config.socket, seed=2) as second:
        request = FakeRequest("b", list(PROMPT))
        assert second.matched(request)[0] == 4 * BLOCK_SIZE
        agent.close()
        assert second.load(request, [9, 8, 7, 6, 5], 4 * BLOCK_SIZE) == {9, 8, 7, 6}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"policy": "fail"}, "kv_load_failure_policy"),
        ({"extra": {"sokcet": "x"}}, "kv_connector_extra_config.sokcet"),
        ({"extra": {"timeout_ms": 0}}, "kv_connector_extra_config.timeout_ms"),
        ({"extra": {"handover_ms": "1"}}, "kv_connector_extra_config.handover_ms"),
        ({"extra": {"model_id": "Big Model"}}, "kv_connector_extra_config.model_id"),
        ({"extra": {"access_key_file": "/does/not/exist"}}, "kv_connector_extra_config.access_key_file"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "speculative_config.method"),
        ({"parallel_config": SimpleNamespace(decode_context_parallel_size=2)}, "decode_context_parallel_size"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, field):
    with stubbed_vllm() as module, pytest.raises(ValueError, match=f"^{field}"):
        module.EMSConnector(vllm_config("x", **changes), KVConnectorRole.SCHEDULER, kv_cache_config())


def test_only_the_connector_hands_over():
    with pytest.raises(ValueError, match=r"^adapter_params\.handover_ms: is not known"):
        Settings.parse({"handover_ms": 1}, "adapter_params")


def test_models_with_other_attention_are_refused():
    with stubbed_vllm() as module, pytest.raises(ValueError, match=r"^kv_cache_config: .* not Mamba \(layer2\)"):
        module.EMSConnector(
            vllm_config("x"), KVConnectorRole.SCHEDULER, kv_cache_config(FullAttentionSpec(), MambaSpec())
        )


@pytest.mark.parametrize(
    ("tensor", "num_parts"),
    [
        (torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, 2, 8), 2),
        (torch.zeros(NUM_BLOCKS, 2, BLOCK_SIZE, 2, 8), 1),
        (torch.zeros(2, NUM_BLOCKS, 2, BLOCK_SIZE, 8).transpose(2, 3), 2),
        (torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 24), 1),
        (torch.zeros(2, 4 * NUM_BLOCKS, BLOCK_SIZE // 4, 2, 8), 2),
    ],
)
def test_blocks_are_found_in_any_layout(tensor, num_parts):
    parts = split_blocks({"a": tensor, "shared": tensor}, NUM_BLOCKS).parts
    assert len(parts) == num_parts
    tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape))
    blocks = tensor if tensor.shape[0] == NUM_BLOCKS else tensor.transpose(0, 1)
    ratio = blocks.shape[0] // NUM_BLOCKS
    for block in range(NUM_BLOCKS):
        whole = torch.cat([part[block, 0].view(torch.float32) for part in parts]).sort().values
        assert torch.equal(whole, blocks[block * ratio : (block + 1) * ratio].flatten().sort().values)


def test_two_blocks_cannot_be_told_from_keys_and_values():
    with pytest.raises(ValueError, match="layer0: a cache of 2 blocks cannot be told from K and V"):
        split_blocks({"layer0": torch.zeros(2, 2, 4, 2, 8)}, 2)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(3, NUM_BLOCKS, 4, 8), torch.zeros(7, 4, 8), torch.zeros(NUM_BLOCKS, 4, 2, 16)[..., :8], [1]],
)
def test_other_memory_is_refused(tensor):
    with pytest.raises(ValueError, match=r"^layer0"):
        split_blocks({"layer0": tensor}, NUM_BLOCKS)


def test_chains_depend_on_every_token_and_salt_before():
    def hashes(tokens: list[int], salt: str | None = None) -> list[int]:
        request = FakeRequest("x", tokens, cache_salt=salt)
        return Chain(BLOCK_SIZE, generate_block_hash_extra_keys).upto(request, len(tokens) // BLOCK_SIZE)

    plain = hashes(PROMPT)
    assert hashes(PROMPT[: 2 * BLOCK_SIZE]) == plain[:2]
    assert not set(hashes([0, *PROMPT[1:]])) & set(plain)
    assert not set(hashes(PROMPT, "s")) & set(plain)


def test_a_local_model_is_named_by_its_files(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"one")
    first = model_fingerprint(str(tmp_path), (1,))
    assert Settings.parse({"model_id": first}).model_id == first
    assert model_fingerprint(str(tmp_path), (2,)) != first
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert model_fingerprint(str(tmp_path), (1,)) != first
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "model.safetensors").write_bytes(b"one")
    assert model_fingerprint(str(copy), (1,)) == first, "a copy on another node is the same model"


def test_after_a_reset_nothing_of_the_old_weights_is_loaded():
    with running_agent() as agent, engine(agent.config.socket) as one, engine(agent.config.socket, seed=2) as other:
        one.compute(FakeRequest("a", list(PROMPT)), [0, 1, 2, 3, 4])
        assert one.matched(FakeRequest("b", list(PROMPT))) == (4 * BLOCK_SIZE, True)
        assert one.scheduler.reset_cache() is True
        assert one.workers[0].reset_cache() is None
        assert one.matched(FakeRequest("c", list(PROMPT))) == (0, False)
        one.compute(FakeRequest("d", list(PROMPT)), [5, 6, 7, 8, 9])
        assert one.matched(FakeRequest("e", list(PROMPT))) == (4 * BLOCK_SIZE, True), "of the new weights"
        old = other.matched(FakeRequest("f", list(PROMPT)))
        assert old == (4 * BLOCK_SIZE, True), "others go on with theirs"


def test_a_load_that_a_reset_overtakes_is_computed():
    with running_agent() as agent, engine(agent.config.socket) as one:
        one.compute(FakeRequest("a", list(PROMPT)), [0, 1, 2, 3, 4])
        late, under_way = FakeRequest("b", list(PROMPT)), FakeRequest("c", list(PROMPT))
        for request, blocks in ((under_way, [5, 6, 7, 8, 9]), (late, [10, 11, 12, 13, 14])):
            assert one.matched(request) == (4 * BLOCK_SIZE, True)
            one.allocate(request, blocks, 4 * BLOCK_SIZE)
            if request is under_way:
                metadata = one.scheduler.build_connector_meta(Step().output())
                one.workers[0].bind_connector_metadata(metadata)
                one.workers[0].start_load_kv(None)
        one.scheduler.reset_cache()
        received: set[str] = set()
        failed: set[int] = set()

        def are_over() -> bool:
            _sent, got, lost = one.step(Step())
            received.update(got)
            failed.update(lost)
            return received == {"b", "c"}

        until(are_over)
        assert failed == {5, 6, 7, 8, 10, 11, 12, 13}


def test_an_agent_of_another_socket_is_found_later(tmp_path):
    """The connector starts before its agent, and uses it from then on."""
    with (
        engine(tmp_path / "ems.sock", extra={"timeout_ms": 2000}) as early,
        running_agent(socket=tmp_path / "ems.sock"),
    ):
        until(lambda: early.workers[0]._moving.circuit.is_up)
        early.compute(FakeRequest("a", list(PROMPT)), [0, 1, 2, 3, 4])
        with engine(tmp_path / "ems.sock", seed=2) as second:
            assert second.matched(FakeRequest("b", list(PROMPT))) == (4 * BLOCK_SIZE, True)
