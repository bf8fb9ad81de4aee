"""The Triton routes about the server and its models (spec 3.3.2.4.2 to 3.3.2.5.1)."""

from typing import Any

from kvloom.server.serving.card import ModelCard
from kvloom.server.serving.service import GenerationService

SERVER_NAME = "MindIE Server"
EXTENSIONS = ["binary_tensor_data", "generate", "model_repository", "statistics"]


def server_metadata(card: ModelCard, version: str, is_oip: bool) -> dict[str, Any]:
    """`extensions` is the object of spec 3.3.2.4.2, or the protocol's list of names when `is_oip`."""
    engine = card.engine
    extensions = {
        "max_iter_times": engine.max_iter_times,
        "prefill_policy_type": engine.prefill_policy,
        "decode_policy_type": engine.decode_policy,
        "max_prefill_batch_size": engine.max_prefill_batch or engine.max_batch,
        "max_prefill_tokens": engine.max_prefill_tokens or engine.max_tokens_per_step,
    }
    return {"name": SERVER_NAME, "version": version, "extensions": EXTENSIONS if is_oip else extensions}


def model_metadata(service: GenerationService, version: str) -> dict[str, Any]:
    def tensor(name: str) -> dict[str, Any]:
        return {"name": name, "shape": [-1], "datatype": "UINT32"}

    return {
        "name": service.name,
        "versions": [version],
        "platform": SERVER_NAME,
        "inputs": [tensor("input0")],
        "outputs": [tensor("output0")],
    }


def model_config(service: GenerationService) -> dict[str, Any]:
    """Memory sizes in GB as configured; -1 is measured."""
    card = service.card
    eos_id = service.tokenizer.eos_id
    return {
        "model_name": service.name,
        "input_datatype": "INT64",
        "output_datatype": "INT64",
        "max_seq_len": service.engine.max_seq_len,
        "eos_token_id": None if eos_id is None else str(eos_id),
        "npu_mem_size": card.npu_mem_gb,
        "cpu_mem_size": card.cpu_mem_gb,
        "world_size": card.world_size,
        "model_weight_path": card.engine.model,
        "model_instance_type": card.instance_type,
    }


def slot_count(service: GenerationService) -> dict[str, Any]:
    """Slots of the running batch, and the tokens that free KV blocks hold."""
    stats = service.engine.stats()
    return {
        "total_slots": stats.max_batch,
        "free_slots": max(0, stats.max_batch - stats.num_running),
        "available_tokens_length": stats.num_free_blocks * service.engine.info.block_size,
    }
