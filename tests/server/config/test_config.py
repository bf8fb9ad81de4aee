"""config.json: both layouts, every mistake reported with its path, and the effect of the values."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvloom.contract.config import TierConfig
from kvloom.contract.errors import BadRequest
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.scheduler import plan_step
from kvloom.engine.schedule.seq import Seq, Status
from kvloom.server.config.keys import LAYOUT_1, keys_of
from kvloom.server.config.settings import Settings, load_settings
from kvloom.server.run.config_cli import starting_point
from kvloom.server.serving.options import WireOptions

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
        "ModelParam": [
            {
                "modelName": "m",
                "modelWeightPath": "/w",
                "worldSize": 1,
                "npuMemSize": 8,
                "cpuMemSize": 5,
                "backendType": "atb",
            }
        ],
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
    """A copy of the document with one value replaced; the path is written as in messages, without indices."""
    copy = json.loads(json.dumps(document))
    at = copy
    *parents, last = path.split(".")
    for name in parents:
        at = at[name][0] if isinstance(at[name], list) else at[name]
    at[last] = value
    return copy


def test_the_layout_of_the_seed_becomes_one_configuration(tmp_path):
    config = Settings(load_settings(write(tmp_path, SEED_LAYOUT))).build()
    assert (config.host, config.port, config.max_link_num) == ("127.0.0.1", 1026, 30)
    assert (config.log.level, config.log.path) == ("Info", tmp_path / "logs/mindservice.log")
    [card] = config.models
    assert (card.name, card.npu_mem_gb, card.cpu_mem_gb, card.world_size) == ("m", 8, 5, 1)
    engine = card.engine
    assert (engine.max_seq_len, engine.max_batch, engine.kv_cache_bytes) == (2560, 200, 8 * 2**30)
    assert (engine.host_cache_bytes, engine.block_size, engine.prealloc_blocks) == (5 * 2**30, 128, 4)
    assert (engine.prefill_policy, engine.decode_policy, engine.is_selecting) == (3, 1, True)
    assert (engine.max_prefill_batch, engine.max_prefill_tokens, engine.max_iter_times) == (50, 8192, 512)
    assert (engine.prefill_ms_per_seq, engine.decode_ms_per_seq, engine.max_preempt) == (150, 50, 20)
    assert engine.max_queue_delay_s == 0.005


@pytest.mark.parametrize(("max_batch", "num_tokens"), [(1, 512), (512, 512), (513, 513), (5000, 5000)])
def test_a_step_has_a_token_for_every_sequence_of_the_largest_batch(tmp_path, max_batch, num_tokens):
    document = changed(LATER_LAYOUT, "BackendConfig.ScheduleConfig.maxBatchSize", max_batch)
    [card] = Settings(load_settings(write(tmp_path, document))).build().models
    assert (card.engine.max_batch, card.engine.max_tokens_per_step) == (max_batch, num_tokens)


@pytest.mark.parametrize("num_decoding", [0, 199])
@pytest.mark.parametrize(
    ("layout", "path", "most"),
    [
        *((SEED_LAYOUT, "ScheduleParam.maxPrefillTokens", most) for most in (4096, 4097, 8192, 409_600)),
        *((LATER_LAYOUT, "BackendConfig.ScheduleConfig.maxPrefillTokens", most) for most in (1, 511, 513, 409_600)),
    ],
)
def test_a_step_computes_as_many_prompt_tokens_as_max_prefill_tokens_says(
    tmp_path, layout, path, most, num_decoding
):  # spec table 2-6
    """In a batch of 200, one request at least must be in prefill or waiting."""
    engine = Settings(load_settings(write(tmp_path, changed(layout, path, most)))).build().models[0].engine
    limits, pool, prompt = replace(engine.limits(128), is_selecting=False), BlockPool(5000), [1] * 500_000
    seqs = [Seq(i, [1, 2], 1, status=Status.RUNNING, num_computed=1) for i in range(num_decoding)]
    prefilling = Seq(1000, prompt, len(prompt), status=Status.RUNNING)
    for last in (prefilling, Seq(1001, prompt, len(prompt))):
        last.max_len = len(prompt)
        plan = plan_step([*seqs, last], pool, limits)
        assert [step.num_tokens for step in plan.steps] == [1] * num_decoding + [most]


@pytest.mark.parametrize(("gap_ms", "gap_s"), [(None, None), (-1, None), (0, 0.0), (62.5, 0.0625)])
def test_the_gap_of_streams_is_three_decode_steps_unless_it_is_given(tmp_path, gap_ms, gap_s):
    document = SEED_LAYOUT if gap_ms is None else changed(SEED_LAYOUT, "ScheduleParam.maxDecodeGap", gap_ms)
    settings = Settings(load_settings(write(tmp_path, document)))
    assert settings.build().models[0].engine.max_gap_s == gap_s
    settings.override(max_gap_ms=40.0)  # those of the command line
    assert settings.build().models[0].engine.max_gap_s == 0.04


def test_streams_send_each_token_unless_an_interval_is_given(tmp_path):
    for document, interval in (
        (SEED_LAYOUT, 1),
        (changed(SEED_LAYOUT, "ScheduleParam.streamInterval", 7), 7),
        (changed(LATER_LAYOUT, "BackendConfig.ScheduleConfig.streamInterval", 8), 8),
    ):
        settings = Settings(load_settings(write(tmp_path, document)))
        assert settings.build().models[0].stream_interval == interval
        settings.override(stream_interval=3)  # that of the command line
        assert settings.build().models[0].stream_interval == 3


def test_the_later_layout_is_read_too(tmp_path):
    config = Settings(load_settings(write(tmp_path, LATER_LAYOUT))).build()
    assert (config.port, config.max_link_num, config.models[0].engine.max_batch) == (1026, 1000, 200)
    assert config.models[0].engine.kv_cache_bytes is None


def test_a_kv_pool_becomes_the_outer_tier_of_the_engine(tmp_path):
    pool = {"backend": "ems", "socketPath": "run/ems.sock", "timeoutMs": 250, "accessId": "a", "accessKeyFile": "/k"}
    pool["verifyBlocks"] = True
    document = json.loads(json.dumps(LATER_LAYOUT))
    document["BackendConfig"]["kvPoolConfig"] = pool
    assert Settings(load_settings(write(tmp_path, document))).build().models[0].engine.kv_tier == TierConfig(
        "kvloom.rank.tier.ems:open_tier",
        0.25,
        {"socket": str(tmp_path / "run/ems.sock"), "access_id": "a", "access_key_file": "/k"},
        is_watched=True,
    )
    document["BackendConfig"]["kvPoolConfig"] = {"backend": ""}
    assert Settings(load_settings(write(tmp_path, document))).build().models[0].engine.kv_tier is None
    document["BackendConfig"]["kvPoolConfig"] = {"timeoutMs": 250}
    with pytest.raises(BadRequest, match=r"^kvPoolConfig\.backend: must be \"ems\" when other keys"):
        Settings(load_settings(write(tmp_path, document))).build()


def test_the_first_layout_has_a_kv_pool_too(tmp_path):
    document = json.loads(json.dumps(SEED_LAYOUT))
    document["ModelDeployParam"]["kvPoolConfig"] = {"backend": "ems", "timeoutMs": 100}
    tier = Settings(load_settings(write(tmp_path, document))).build().models[0].engine.kv_tier
    assert tier == TierConfig("kvloom.rank.tier.ems:open_tier", 0.1, {})


def test_the_cache_may_be_bytes_and_tokens_may_be_guessed_ahead(tmp_path):
    document = changed(LATER_LAYOUT, "BackendConfig.ModelDeployConfig.ModelConfig.kvCacheDtype", "int8")
    document = changed(document, "BackendConfig.ScheduleConfig.numSpeculativeTokens", 4)
    engine = Settings(load_settings(write(tmp_path, document))).build().models[0].engine
    assert (engine.kv_dtype, engine.num_speculative_tokens) == ("int8", 4)


def test_several_models_share_what_is_said_of_all(tmp_path):
    models = [{"modelName": name, "modelWeightPath": f"/{name}", "npuMemSize": 1} for name in ("a", "b")]
    document = changed(LATER_LAYOUT, "BackendConfig.ModelDeployConfig.ModelConfig", models)
    config = Settings(load_settings(write(tmp_path, document))).build()
    assert [(card.name, card.engine.model) for card in config.models] == [("a", "/a"), ("b", "/b")]
    assert {card.engine.max_batch for card in config.models} == {200}


def test_two_models_of_one_name_are_refused(tmp_path):
    model = {"modelName": "a", "modelWeightPath": "/a"}
    document = changed(LATER_LAYOUT, "BackendConfig.ModelDeployConfig.ModelConfig", [model, model])
    with pytest.raises(BadRequest, match="modelName: must differ from model to model, got a, a"):
        Settings(load_settings(write(tmp_path, document))).build()


def test_a_flag_of_one_model_is_refused_when_there_are_several(tmp_path):
    models = [{"modelName": name, "modelWeightPath": f"/{name}"} for name in ("a", "b")]
    document = changed(LATER_LAYOUT, "BackendConfig.ModelDeployConfig.ModelConfig", models)
    settings = Settings(load_settings(write(tmp_path, document)))
    with pytest.raises(BadRequest, match="dtype: cannot be given for the 2 models"):
        settings.override_model(dtype="float32")


def test_switches_of_the_wire_and_the_management_port(tmp_path):
    serve = {
        "managementPort": 1030,
        "managementIpAddress": "127.0.0.2",
        "fullTextEnabled": True,
        "openAiSupport": "seed",
        "maxInputChars": 10,
        "tgiRootObject": True,
        "inferEchoInput": True,
        "oipHealthBody": True,
        "validateModel": False,
        "maxQueuedTokens": 4096,
        "maxRequestLength": 2,
        "corsOrigins": ["https://a.example"],
    }
    document = changed(LATER_LAYOUT, "ServerConfig", {**LATER_LAYOUT["ServerConfig"], **serve})
    config = Settings(load_settings(write(tmp_path, document))).build()
    assert list(config.addresses.values()) == [("127.0.0.1", 1026), ("127.0.0.2", 1030)]
    assert config.options == WireOptions(False, 10, True, True, True, True, 16)
    assert (config.max_queued_tokens, config.max_body_bytes) == (4096, 2 * 2**20)
    assert config.cors_origins == {"https://a.example"}


def test_flags_override_the_file(tmp_path):
    settings = Settings(load_settings(write(tmp_path, SEED_LAYOUT)))
    settings.override(port=0, host=None, max_batch=100)
    settings.override_model(dtype="float32", name=None)
    config = settings.build()
    engine = config.models[0].engine
    assert (config.port, config.host, engine.max_batch, engine.dtype) == (0, "127.0.0.1", 100, "float32")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("OtherParam.ServeParam.port", 80, "must be between 1024 and 65535, got 80"),
        ("OtherParam.ServeParam.port", "1025", 'must be a whole number from 1024 to 65535, got "1025"'),
        ("OtherParam.ServeParam.port", True, "must be a whole number from 1024 to 65535, got true"),
        ("OtherParam.ServeParam.maxLinkNum", 0, "must be between 1 and 1000, got 0"),
        ("OtherParam.ServeParam.httpsEnabled", 1, "must be true or false, got 1"),
        ("OtherParam.ServeParam.prot", 1, "is not known; did you mean port?"),
        ("OtherParam.LogParam.logLevel", "Debug", 'must be one of "Verbose", "Info", "Warning", "Error", "None"'),
        ("ModelDeployParam.maxSeqLen", 0, "must be between 2 and 2147483647, got 0"),
        ("ModelDeployParam.ModelParam", [], "must be a list of models, at least one"),
        ("ModelDeployParam.ModelParam", {}, "must be a list of models, at least one"),
        ("ScheduleParam.maxIterTimes", 2560, "must be at most 2559 (ModelDeployParam.maxSeqLen - 1), got 2560"),
        ("ScheduleParam.maxPreemptCount", 201, "must be at most 200 (ScheduleParam.maxBatchSize), got 201"),
        ("ScheduleParam.maxPrefillBatchSize", 300, "must be at most 200 (ScheduleParam.maxBatchSize), got 300"),
        ("ScheduleParam.maxPrefillTokens", 4095, "must be between 4096 and 409600, got 4095"),
        ("ScheduleParam.streamInterval", 1001, "must be between 1 and 1000, got 1001"),
        ("ScheduleParam.maxDecodeGap", -0.5, "must be -1 or 0 ms and more, got -0.5"),
        ("ScheduleParam.maxDecodeGap", 100_001, "must be between -1 and 100000, got 100001"),
        ("OtherParam.ResourceParam.preAllocBlocks", 5, "must be at most 4 (maxIterTimes / cacheBlockSize), got 5"),
        ("ScheduleParam.prefillPolicyType", 2, "must be one of 0, 1, 3, got 2"),
        ("ScheduleParam", [], "must be an object, got []"),
        ("Surprise", {}, "is not known; known are OtherParam"),
    ],
)
def test_a_wrong_value_is_named_by_its_path_with_what_is_allowed(tmp_path, path, value, words):
    with pytest.raises(BadRequest) as caught:
        load_settings(write(tmp_path, changed(SEED_LAYOUT, path, value)))
    assert str(caught.value).startswith(f"{path}: {words}")


@pytest.mark.parametrize("path", [path for path, key in keys_of(LAYOUT_1) if key.is_required])
def test_a_required_key_that_is_missing_is_named(tmp_path, path):
    *parents, last = path.replace("[]", "").split(".")
    document = json.loads(json.dumps(SEED_LAYOUT))
    at = document
    for name in parents:
        at = at[name][0] if isinstance(at[name], list) else at[name]
    del at[last]
    with pytest.raises(BadRequest, match=r"is missing") as caught:
        load_settings(write(tmp_path, document))
    assert caught.value.field.replace("[0]", "") == path.replace("[]", "")


def test_a_mock_needs_no_weights(tmp_path):
    model = {**SEED_LAYOUT["ModelDeployParam"]["ModelParam"][0], "modelInstanceType": "StandardMock"}
    del model["modelWeightPath"]
    load_settings(write(tmp_path, changed(SEED_LAYOUT, "ModelDeployParam.ModelParam", [model])))


def test_comments_are_allowed_but_not_inside_texts(tmp_path):
    text = json.dumps(changed(SEED_LAYOUT, "WorkFlowParam.TemplateParam.templateName", "a // b"), indent=1)
    path = write(tmp_path, text.replace("\n", ' // a comment with "quotes"\n'))
    assert load_settings(path)["max_batch"] == 200


def test_a_file_that_everybody_can_read_is_a_note_for_the_log(tmp_path):
    path = write(tmp_path, SEED_LAYOUT, mode=0o644)
    assert f"{path} can be read by everybody; run: chmod 640 {path}" in load_settings(path)["notes"]


def test_what_init_writes_is_right_and_explains_every_key(tmp_path):
    path = write(tmp_path, starting_point())
    settings = Settings(load_settings(path))
    assert settings.build().models[0].name == "smollm2"
    for name, key in keys_of(LAYOUT_1):
        if key.default is not None:
            assert f"// {key.meaning}: {key.allowed}\n" in path.read_text(), name


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not valid JSON"), ("[]", "must hold a JSON object"), ("\x00", "is not valid JSON")]
)
def test_a_file_that_is_no_object_is_named(tmp_path, text, words):
    with pytest.raises(BadRequest, match=words):
        load_settings(write(tmp_path, text))


def test_a_file_that_others_can_write_is_refused_with_the_command_that_mends_it(tmp_path):
    with pytest.raises(BadRequest, match="can be written by others; run: chmod 640"):
        load_settings(write(tmp_path, SEED_LAYOUT, mode=0o666))


@pytest.mark.parametrize(("path", "problem"), [("/tmp", "Is a directory"), ("/dev/zero", "it is larger than")])
def test_nobody_is_told_to_change_the_rights_of_a_folder_or_device(path, problem):
    with pytest.raises(BadRequest, match=f"^{path}: cannot be read: {problem}"):
        load_settings(Path(path))


def test_a_file_that_is_too_big_is_refused(tmp_path):
    with pytest.raises(BadRequest, match="is larger than 10485760 bytes"):
        load_settings(write(tmp_path, " " * (10 * 2**20 + 1)))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("ServerConfig.tlsCert", "\ud800.pem", r'must not hold "\\ud800", half a character'),
        ("ServerConfig.tlsCaFile", ["\0"], "must not hold a NUL character"),
        ("ServerConfig.tlsCaFile", ["a", "\udfff"], r'must not hold "\\udfff", half a character'),
        ("BackendConfig.ModelDeployConfig.maxSeqLen", 1, "must be between 2 and 2147483647, got 1"),
        ("BackendConfig.ModelDeployConfig.maxSeqLen", 10**30, "must be between 2 and 2147483647, got 1"),
        ("BackendConfig.ModelDeployConfig.ModelConfig.plugin_params", "[" * 5000, "must be an object with"),
        ("LogConfig.logLevel", "DEBUG", "must be one of"),
    ],
)
def test_what_no_path_number_or_parser_holds_is_refused_by_the_keys_name(tmp_path, path, value, words):
    with pytest.raises(BadRequest, match=words) as caught:
        load_settings(write(tmp_path, changed(LATER_LAYOUT, path, value)))
    assert str(caught.value).replace("[0]", "").startswith(f"{path}: ")


def test_swapping_without_a_word_of_its_memory_is_refused(tmp_path):
    document = changed(LATER_LAYOUT, "BackendConfig.ScheduleConfig.supportSwapPolicy", True)
    model = "BackendConfig.ModelDeployConfig.ModelConfig"
    with pytest.raises(BadRequest) as caught:
        load_settings(write(tmp_path, document))
    switch = "BackendConfig.ScheduleConfig.supportSwapPolicy"
    assert str(caught.value) == f"{model}[0].cpuMemSize: is missing: it must be above 0 GB when {switch} is true"
    with_memory = changed(document, f"{model}.cpuMemSize", 1)
    assert Settings(load_settings(write(tmp_path, with_memory))).build().models[0].engine.host_cache_bytes == 2**30


def test_a_key_that_stands_without_the_one_it_is_about_is_told(tmp_path):
    document = changed(LATER_LAYOUT, "ServerConfig.managementIpAddress", "127.0.0.2")
    path = write(tmp_path, document)
    told = f"{path}: ServerConfig.managementIpAddress: without effect without managementPort or metricsPort"
    assert told in load_settings(path)["notes"]
    for port in ("managementPort", "metricsPort"):
        write(tmp_path, changed(document, f"ServerConfig.{port}", 1027))
        assert told not in load_settings(path)["notes"]


def test_a_folder_of_revoked_certificates_of_which_no_file_is_named_is_told(tmp_path):
    path = tmp_path / "config.json"
    text = starting_point(https=True).replace('"httpsEnabled"', '"tlsCrlPath": "security", "httpsEnabled"')
    write(tmp_path, text)
    told = "tlsCrlPath: without effect: tlsCrlFiles names no list of revoked certificates in it"
    assert any(note.endswith(told) for note in load_settings(path)["notes"])
    write(tmp_path, text.replace('"tlsCrlPath"', '"tlsCrlFiles": ["crl.pem"], "tlsCrlPath"'))
    assert not any(note.endswith(told) for note in load_settings(path)["notes"])
