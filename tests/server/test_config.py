"""config.json: both layouts, every mistake named by its path, and what becomes of the values."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvloom.engine.errors import BadRequest
from kvloom.server.config import Settings, load_settings

SEED_LAYOUT: dict[str, Any] = {
    "OtherParam": {
        "ResourceParam": {"cacheBlockSize": 128, "preAllocBlocks": 4},
        "LogParam": {"logLevel": "Info", "logPath": "/logs/mindservice.log"},
        "ServeParam": {"ipAddress": "127.0.0.1", "port": 1026, "maxLinkNum": 30, "httpsEnabled": False},
    },
    "WorkFlowParam": {"TemplateParam": {"templateType": "Standard", "templateName": "t", "pipelineNumber": 1}},
    "ModelDeployParam": {
        "maxSeqLen": 2560,
        "npuDeviceIds": [[0]],
        "ModelParam": [{"modelName": "m", "modelWeightPath": "/w", "worldSize": 1, "npuMemSize": 8, "cpuMemSize": 5}],
    },
    "ScheduleParam": {
        "maxPrefillBatchSize": 50,
        "maxPrefillTokens": 8192,
        "prefillPolicyType": 3,
        "decodePolicyType": 1,
        "maxBatchSize": 200,
        "maxIterTimes": 512,
        "maxPreemptCount": 20,
        "supportSelectBatch": True,
        "prefillTimeMsPerReq": 150,
        "decodeTimeMsPerReq": 50,
        "maxQueueDelayMicroseconds": 5000,
    },
}
LATER_LAYOUT: dict[str, Any] = {
    "Version": "1.0.0",
    "ServerConfig": {"ipAddress": "127.0.0.1", "port": 1026, "maxLinkNum": 1000, "allowAllZeroIpListening": False},
    "BackendConfig": {
        "npuDeviceIds": [[0]],
        "ModelDeployConfig": {"maxSeqLen": 2560, "ModelConfig": [{"modelName": "m", "modelWeightPath": "/w"}]},
        "ScheduleConfig": {"templateType": "Standard", "cacheBlockSize": 128, "maxBatchSize": 200},
    },
    "LogConfig": {"logLevel": "Info"},
}


def write(folder: Path, document: Any, mode: int = 0o640) -> Path:
    path = folder / "config.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    path.chmod(mode)
    return path


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of the document with one value replaced; path as in messages, without indices."""
    copy = json.loads(json.dumps(document))
    at = copy
    *parents, last = path.split(".")
    for name in parents:
        at = at[name][0] if isinstance(at[name], list) else at[name]
    at[last] = value
    return copy


def test_the_layout_of_the_seed_becomes_one_configuration(tmp_path):
    settings = Settings(load_settings(write(tmp_path, SEED_LAYOUT)))
    config = settings.build("/w")
    assert (config.host, config.port, config.max_link_num) == ("127.0.0.1", 1026, 30)
    assert config.served_model_name == "m"
    engine = config.engine
    assert (engine.max_seq_len, engine.max_batch, engine.kv_cache_bytes) == (2560, 200, 8 * 2**30)
    assert (engine.prefill_policy, engine.decode_policy, engine.is_selecting) == (3, 1, True)
    assert (engine.max_prefill_batch, engine.max_prefill_tokens, engine.max_iter_times) == (50, 8192, 512)
    assert (engine.prefill_ms_per_seq, engine.decode_ms_per_seq, engine.max_preempt) == (150, 50, 20)
    assert engine.max_queue_delay_s == 0.005


def test_the_later_layout_is_read_too(tmp_path):
    config = Settings(load_settings(write(tmp_path, LATER_LAYOUT))).build("/w")
    assert (config.port, config.max_link_num, config.engine.max_batch) == (1026, 1000, 200)
    assert config.engine.kv_cache_bytes is None


def test_flags_override_the_file(tmp_path):
    settings = Settings(load_settings(write(tmp_path, SEED_LAYOUT)))
    settings.override(port=0, host=None, max_batch=100)
    config = settings.build("/w")
    assert (config.port, config.host, config.engine.max_batch) == (0, "127.0.0.1", 100)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("OtherParam.ServeParam.port", 80, "must be between 1024 and 65535, got 80"),
        ("OtherParam.ServeParam.port", "1025", 'must be a whole number, got "1025"'),
        ("OtherParam.ServeParam.port", True, "must be a whole number, got true"),
        ("OtherParam.ServeParam.maxLinkNum", 0, "must be between 1 and 1000, got 0"),
        ("OtherParam.ServeParam.httpsEnabled", 1, "must be true or false, got 1"),
        ("OtherParam.ServeParam.prot", 1, "is not known; known are ipAddress, port"),
        ("OtherParam.LogParam.logLevel", "Debug", 'must be one of "Verbose", "Info", "Warning", "Error", "None"'),
        ("ModelDeployParam.maxSeqLen", 0, "must be at least 1, got 0"),
        ("ModelDeployParam.ModelParam", [], "must be a list of one model"),
        ("ScheduleParam.prefillPolicyType", 2, "must be one of 0, 1, 3, got 2"),
        ("ScheduleParam", [], "must be an object, got []"),
        ("Surprise", {}, "is not known; known are OtherParam"),
    ],
)
def test_a_wrong_value_is_named_by_its_path_with_what_is_allowed(tmp_path, path, value, words):
    with pytest.raises(BadRequest) as caught:
        load_settings(write(tmp_path, changed(SEED_LAYOUT, path, value)))
    assert str(caught.value).startswith(f"{path}: {words}")


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not valid JSON"), ("[]", "must hold a JSON object"), ("\x00", "is not valid JSON")]
)
def test_a_file_that_is_no_object_is_named(tmp_path, text, words):
    with pytest.raises(BadRequest, match=words):
        load_settings(write(tmp_path, text))


def test_a_file_that_others_can_write_is_refused_with_the_command_that_mends_it(tmp_path):
    with pytest.raises(BadRequest, match="can be written by others; run: chmod 640"):
        load_settings(write(tmp_path, SEED_LAYOUT, mode=0o666))


def test_a_file_that_is_too_big_is_refused(tmp_path):
    with pytest.raises(BadRequest, match="is larger than 10485760 bytes"):
        load_settings(write(tmp_path, " " * (10 * 2**20 + 1)))
