"""config.json as vendors publish it, all mistakes of a file in one run, and what `config check` finds before a
start.
"""

import json
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvloom.contract.errors import BadRequest, UserError
from kvloom.server.config.reading import Mistakes
from kvloom.server.config.settings import Settings, load_settings
from kvloom.server.run.launch import read_settings
from kvloom.server.run.preflight import problems
from tests.server.config.test_config import SEED_LAYOUT, changed, write
from tests.server.run.test_daemon import DAEMON
from tests.support.processes import CLI, serving

# in the layout and with the values of the config.json that ships with 2.x
PUBLISHED_2: dict[str, Any] = {
    "Version": "1.0.0",
    "ServerConfig": {
        "ipAddress": "127.0.0.1", "managementIpAddress": "127.0.0.2", "port": 1025, "managementPort": 1026,
        "metricsPort": 1027, "allowAllZeroIpListening": False, "maxLinkNum": 1000, "httpsEnabled": False,
        "fullTextEnabled": False, "tlsCaPath": "security/ca/", "tlsCaFile": ["ca.pem"],
        "tlsCert": "security/certs/server.pem", "tlsPk": "security/keys/server.key.pem",
        "tlsPkPwd": "security/pass/key_pwd.txt", "tlsCrlPath": "security/certs/", "tlsCrlFiles": ["server_crl.pem"],
        "managementTlsCaFile": ["management_ca.pem"], "managementTlsCert": "security/certs/management/server.pem",
        "managementTlsPk": "security/keys/management/server.key.pem",
        "managementTlsPkPwd": "security/pass/management/key_pwd.txt",
        "managementTlsCrlPath": "security/management/certs/", "managementTlsCrlFiles": ["server_crl.pem"],
        "kmcKsfMaster": "tools/pmt/master/ksfa", "kmcKsfStandby": "tools/pmt/standby/ksfb", "inferMode": "standard",
        "interCommTLSEnabled": True, "interCommPort": 1121, "interCommTlsCaPath": "security/grpc/ca/",
        "interCommTlsCaFiles": ["ca.pem"], "interCommTlsCert": "security/grpc/certs/server.pem",
        "interCommPk": "security/grpc/keys/server.key.pem", "interCommPkPwd": "security/grpc/pass/key_pwd.txt",
        "interCommTlsCrlPath": "security/grpc/certs/", "interCommTlsCrlFiles": ["server_crl.pem"],
        "openAiSupport": "vllm", "tokenTimeout": 600, "e2eTimeout": 600, "distDPServerEnabled": False,
    },
    "BackendConfig": {
        "backendName": "mindieservice_llm_engine", "modelInstanceNumber": 1, "npuDeviceIds": [[0, 1, 2, 3]],
        "tokenizerProcessNumber": 8, "multiNodesInferEnabled": False, "multiNodesInferPort": 1120,
        "interNodeTLSEnabled": True, "interNodeTlsCaPath": "security/grpc/ca/", "interNodeTlsCaFiles": ["ca.pem"],
        "interNodeTlsCert": "security/grpc/certs/server.pem", "interNodeTlsPk": "security/grpc/keys/server.key.pem",
        "interNodeTlsPkPwd": "security/grpc/pass/mindie_server_key_pwd.txt",
        "interNodeTlsCrlPath": "security/grpc/certs/", "interNodeTlsCrlFiles": ["server_crl.pem"],
        "interNodeKmcKsfMaster": "tools/pmt/master/ksfa", "interNodeKmcKsfStandby": "tools/pmt/standby/ksfb",
        "ModelDeployConfig": {
            "maxSeqLen": 2560, "maxInputTokenLen": 2048, "truncation": False,
            "ModelConfig": [{
                "modelInstanceType": "Standard", "modelName": "llama_65b",
                "modelWeightPath": "/data/atb_testdata/weights/llama1-65b-safetensors", "worldSize": 4,
                "cpuMemSize": 5, "npuMemSize": -1, "backendType": "atb", "trustRemoteCode": False,
                "async_scheduler_wait_time": 120, "kv_trans_timeout": 10, "kv_link_timeout": 1080,
            }],
        },
        "ScheduleConfig": {
            "templateType": "Standard", "templateName": "Standard_LLM", "cacheBlockSize": 128,
            "maxPrefillBatchSize": 50, "maxPrefillTokens": 8192, "prefillTimeMsPerReq": 150, "prefillPolicyType": 0,
            "decodeTimeMsPerReq": 50, "decodePolicyType": 0, "maxBatchSize": 200, "maxIterTimes": 512,
            "maxPreemptCount": 0, "supportSelectBatch": False, "maxQueueDelayMicroseconds": 5000,
            "maxFirstTokenWaitTime": 2500,
        },
    },
    "LogConfig": {"dynamicLogLevel": "", "dynamicLogLevelValidHours": 2, "dynamicLogLevelValidTime": ""},
}  # fmt: skip
PUBLISHED_1: dict[str, Any] = {  # version 1.0: single files where 2.x has folders and lists, and sizes of the log
    **PUBLISHED_2,
    "ServerConfig": {
        **{k: v for k, v in PUBLISHED_2["ServerConfig"].items() if "Crl" not in k and not k.startswith("interComm")},
        "tlsCrl": "security/certs/server_crl.pem", "managementTlsCrl": "security/certs/management/server_crl.pem",
        "interCommTLSEnabled": False, "interCommPort": 1121, "interCommTlsCaFile": "security/grpc/ca/ca.pem",
        "interCommTlsCert": "security/grpc/certs/server.pem", "interCommTlsCrl": "security/certs/server_crl.pem",
    },
    "LogConfig": {"logLevel": "Info", "logFileSize": 20, "logFileNum": 20, "logPath": "logs/mindservice.log"},
}  # fmt: skip
FIRST_TLS = {
    "tlsCaPath": "security/ca/", "tlsCaFile": ["ca.pem"], "tlsCert": "security/certs/server.pem",
    "tlsPk": "security/keys/server.key.pem", "tlsPkPwd": "security/pass/mindie_server_key_pwd.txt",
    "kmcKsMaster": "tools/pmt/master/ksfa", "kmcKsStandby": "tools/pmt/standby/ksfb",
    "tlsCrl": "security/certs/server_crl.pem",
}  # fmt: skip
PUBLISHED_0 = changed(
    SEED_LAYOUT, "OtherParam.ServeParam", {**SEED_LAYOUT["OtherParam"]["ServeParam"], "maxLinkNum": 300, **FIRST_TLS}
)


MODEL_2 = "BackendConfig.ModelDeployConfig.ModelConfig"
PLUGINS = "plugin_type may name prefix_cache, splitfuse; numSpeculativeTokens guesses tokens ahead, "


@pytest.mark.parametrize("document", [PUBLISHED_0, PUBLISHED_1, PUBLISHED_2], ids=["first", "1.0", "2.x"])
def test_the_published_files_load_as_they_are(tmp_path, document):
    settings = load_settings(write(tmp_path, document))
    settings.pop("device_ids")  # four, where this machine may have fewer
    config = Settings(settings).build()
    assert config.tls is None
    assert config.models[0].engine.backend == "auto"


def test_what_a_published_file_asks_for_in_vain_is_named_in_one_note(tmp_path):
    notes = load_settings(write(tmp_path, PUBLISHED_2))["notes"]
    [idle] = [note for note in notes if "without effect here" in note]
    for name in ("interCommPort", "interNodeTlsCert", "managementTlsCert", "maxFirstTokenWaitTime", "kv_trans_timeout"):
        assert re.search(rf"\b{name}\b", idle), name
    for name in (
        "maxInputTokenLen",
        "tlsCrlFiles",
        "inferMode",
        "truncation",
        "templateName",
        "e2eTimeout",
        "metricsPort",
        "tokenizerProcessNumber",
    ):
        assert not re.search(rf"\b{name}\b", idle), name
    assert any("backendType: atb is not here" in note for note in notes)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("ServerConfig.distDPServerEnabled", True, "must be one of false, got true"),
        ("ServerConfig.inferMode", "dmi", 'must be one of "standard", got "dmi"'),
        ("BackendConfig.multiNodesInferEnabled", True, "must be one of false, got true"),
        ("BackendConfig.modelInstanceNumber", 2, "must be one of 1, got 2"),
        ("BackendConfig.ModelDeployConfig.ModelConfig.trustRemoteCode", True, "must be one of false, got true"),
        ("BackendConfig.ModelDeployConfig.ModelConfig.ignore_eos", True, "must be one of false, got true"),
        ("BackendConfig.ModelDeployConfig.truncation", True, "must be one of false, got true"),
        (f"{MODEL_2}.tp", 2, "must be worldSize, 4, or -1 for that, got 2"),
        (f"{MODEL_2}.dp", 2, "must be one of -1, 1, got 2"),
        (f"{MODEL_2}.moe_tp", 4, "must be one of -1, 1, got 4"),
        (f"{MODEL_2}.plugin_params", {"plugin_type": "la"}, PLUGINS + 'got "la"'),
        (f"{MODEL_2}.plugin_params", '{"plugin_type": "prefix_cache,mtp"}', PLUGINS + 'got "mtp"'),
        (
            f"{MODEL_2}.plugin_params",
            "prefix_cache",
            'must be an object with "plugin_type", or its text, got "prefix_cache"',
        ),
        ("ServerConfig.e2eTimeout", 0, "must be between 1 and 65535, got 0"),
        ("Version", "2.0", 'must be one of "1.0.0", got "2.0"'),
    ],
)
def test_what_would_need_another_machine_is_refused_by_its_value(tmp_path, path, value, words):
    with pytest.raises(BadRequest) as caught:
        load_settings(write(tmp_path, changed(PUBLISHED_2, path, value)))
    assert str(caught.value).replace("[0]", "") == f"{path}: {words}"


def test_the_longest_prompt_is_what_the_later_layout_says(tmp_path):
    document = changed(PUBLISHED_2, "BackendConfig.npuDeviceIds", [[0]])
    document = changed(document, "BackendConfig.ModelDeployConfig.ModelConfig.worldSize", 1)
    assert Settings(load_settings(write(tmp_path, document))).build().models[0].max_input_tokens == 2048


def built(tmp_path, **more):
    """The settings that result from the 2.x file with one device and with other values, given by their paths."""
    document = changed(PUBLISHED_2, "BackendConfig.npuDeviceIds", [[0]])
    document = changed(document, f"{MODEL_2}.worldSize", 1)
    for path, value in more.items():
        document = changed(document, path.replace("__", "."), value)
    return Settings(load_settings(write(tmp_path, document))).build()


def test_what_a_published_file_sets_is_set(tmp_path):
    config = built(tmp_path)
    assert config.metrics == ("127.0.0.2", 1027)
    assert list(config.addresses.values()) == [("127.0.0.1", 1025), ("127.0.0.2", 1026), ("127.0.0.2", 1027)]
    assert config.num_parsers == 8
    assert config.models[0].time_limit_s == 600
    assert config.workflow == "Standard_LLM"


def test_a_metrics_port_that_is_another_port_is_that_port(tmp_path):
    assert built(tmp_path, ServerConfig__metricsPort=1026).metrics is None
    with pytest.raises(BadRequest, match="metricsPort: must differ from port where there is a managementPort"):
        built(tmp_path, ServerConfig__metricsPort=1025)


@pytest.mark.parametrize(
    "plugins", ["", {}, '{"plugin_type": "prefix_cache"}', {"plugin_type": "splitfuse, prefix_cache"}]
)
@pytest.mark.parametrize("tp", [-1, 1])
def test_what_is_always_on_may_be_asked_for(tmp_path, plugins, tp):
    document = changed(PUBLISHED_2, "BackendConfig.npuDeviceIds", [[0]])
    document = changed(document, f"{MODEL_2}.worldSize", 1)
    model = document["BackendConfig"]["ModelDeployConfig"]["ModelConfig"][0]
    model |= {"plugin_params": plugins, "tp": tp, "dp": 1, "moe_ep": -1}
    assert load_settings(write(tmp_path, document))["models"][0]["world_size"] == 1


@pytest.mark.parametrize(("number", "notes"), [(1, 0), (2, 1), (10, 1)])
def test_pipelines_are_one_and_a_file_that_wants_more_is_told_so(tmp_path, number, notes):
    path = write(tmp_path, changed(SEED_LAYOUT, "WorkFlowParam.TemplateParam.pipelineNumber", number))
    told = [note for note in load_settings(path)["notes"] if "WorkFlowParam.TemplateParam.pipelineNumber" in note]
    assert len(told) == notes


def test_a_mock_needs_no_path_and_may_have_an_empty_one(tmp_path):
    document = changed(SEED_LAYOUT, "ModelDeployParam.ModelParam.modelInstanceType", "StandardMock")
    load_settings(write(tmp_path, changed(document, "ModelDeployParam.ModelParam.modelWeightPath", "")))


def test_all_mistakes_of_a_file_are_told_in_one_run(tmp_path):
    document = changed(SEED_LAYOUT, "OtherParam.ServeParam.port", 80)
    document = changed(document, "OtherParam.ServeParam.maxlinknum", 5)
    del document["OtherParam"]["ServeParam"]["maxLinkNum"]
    document = changed(document, "ScheduleParam.cacheBlockSize", 128)
    document = changed(document, "ScheduleParam.maxBatchSize", "200")
    document = changed(document, "ModelDeployParam.ModelParam.backendType", "bogus")
    del document["ScheduleParam"]["maxIterTimes"]
    path = write(tmp_path, document)
    with pytest.raises(Mistakes) as caught:
        load_settings(path)
    assert str(caught.value).splitlines() == [
        f"{path} has 6 mistakes:",
        "OtherParam.ServeParam.maxlinknum: is not known; did you mean maxLinkNum?",
        "OtherParam.ServeParam.port: must be between 1024 and 65535, got 80",
        "ModelDeployParam.ModelParam[0].backendType: must name a back end that is installed (default, auto, cpu, "
        'torch, reference, mock, fake, vllm; atb, mindformer, torchair, ms or "" count as default), got "bogus"',
        "ScheduleParam.cacheBlockSize: is not known here; its path is OtherParam.ResourceParam.cacheBlockSize or "
        "BackendConfig.ScheduleConfig.cacheBlockSize",
        "ScheduleParam.maxIterTimes: is missing",
        'ScheduleParam.maxBatchSize: must be a whole number from 1 to 5000, got "200"',
    ]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("OtherParam.ServeParam.tlsCert", "x" * 4097, "must have at most 4096 characters, it has 4097"),
        ("OtherParam.ServeParam.tlsCaFile", [1], "must be a list of which each is a text, got 1 in it"),
        ("OtherParam.LogParam.logPath", "x" * 4097, "must have at most 4096 characters, it has 4097"),
        ("ModelDeployParam.ModelParam.modelName", "a b", "must be 1 to 256 letters"),
        ("ModelDeployParam.ModelParam.modelName", "", "must be 1 to 256 letters"),
        ("ModelDeployParam.ModelParam.npuMemSize", 0, "must be above 0 GB, or -1 for a share of what is free, got 0"),
        ("ModelDeployParam.ModelParam.cpuMemSize", -0.5, "must be 0 GB or more, or -1"),
        ("ModelDeployParam.ModelParam.npuMemSize", 1e300, "must be between -1 and 1000000, got 1e+300"),
        ("ModelDeployParam.ModelParam.cpuMemSize", 10**23, "must be between -1 and 1000000, got 1"),
        ("ModelDeployParam.ModelParam.worldSize", 2, "must be as many as the devices of ModelDeployParam.npuDeviceIds"),
        ("ModelDeployParam.npuDeviceIds", [], "must be a list of lists of device numbers"),
        ("ModelDeployParam.npuDeviceIds", [[0, 0]], "must name each device of a model once, got [0, 0]"),
        ("ModelDeployParam.npuDeviceIds", [[0], [1]], "must have one list for each of the 1 models"),
        ("ModelDeployParam.npuDeviceIds", [0, [1]], "must be a list of lists of device numbers"),
        ("ModelDeployParam.npuDeviceIds", [0, 0], "must name each device of a model once, got [0, 0]"),
        ("ModelDeployParam.ModelParam.modelWeightPath", "", "must name a folder, a .gguf file or a fetched model"),
        ("OtherParam.LogParam.logPath", "", "must not be empty"),
        ("WorkFlowParam.TemplateParam.pipelineNumber", 11, "must be between 1 and 10, got 11"),
        ("ScheduleParam.maxBatchSize", 1.5, "must be a whole number from 1 to 5000, got 1.5"),
    ],
)
def test_more_values_that_are_out_of_range(tmp_path, path, value, words):
    with pytest.raises(BadRequest) as caught:
        load_settings(write(tmp_path, changed(SEED_LAYOUT, path, value)))
    assert str(caught.value).replace("[0]", "").startswith(f"{path}: {words}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"OtherParam": {}, "OtherParam": {}}', '"OtherParam" stands twice in one object'),
        ('{"OtherParam": NaN}', "NaN is no number of JSON"),
        ('{"OtherParam": 1e999}', "OtherParam: must be an object"),
    ],
)
def test_json_that_says_nothing_definite_is_refused(tmp_path, text, words):
    with pytest.raises(BadRequest, match=re.escape(words)):
        load_settings(write(tmp_path, text))


def test_a_block_size_that_the_kernels_lack_becomes_the_next_that_they_have(tmp_path):
    document = changed(SEED_LAYOUT, "OtherParam.ResourceParam.cacheBlockSize", 100)
    settings = load_settings(write(tmp_path, document))
    assert settings["block_size"] == 112
    assert any("cacheBlockSize: 100 is no multiple of 16; blocks have 112 tokens" in n for n in settings["notes"])
    torch = changed(document, "ModelDeployParam.ModelParam.backendType", "torch")
    assert load_settings(write(tmp_path, torch))["block_size"] == 100


@pytest.mark.parametrize(("named", "backend"), [("ATB", "auto"), ("", "auto"), ("CPU", "cpu"), ("torch", "reference")])
def test_backend_type_names_what_is_here(tmp_path, named, backend):
    document = changed(SEED_LAYOUT, "ModelDeployParam.ModelParam.backendType", named)
    assert Settings(load_settings(write(tmp_path, document))).build().models[0].engine.backend == backend


def test_swapping_can_be_switched_off_and_needs_memory_when_on(tmp_path):
    off = changed(SEED_LAYOUT, "ScheduleParam.supportSwapPolicy", False)
    assert Settings(load_settings(write(tmp_path, off))).build().models[0].engine.host_cache_bytes == 0
    on = changed(
        changed(SEED_LAYOUT, "ScheduleParam.supportSwapPolicy", True), "ModelDeployParam.ModelParam.cpuMemSize", 0
    )
    with pytest.raises(
        BadRequest, match=r"cpuMemSize: must be above 0 GB when ScheduleParam.supportSwapPolicy is true"
    ):
        load_settings(write(tmp_path, on))


# -- config check, config init --https


def told(path: Path) -> list[str]:
    return [str(error) for error in problems(read_settings(path, {}))]


def mock_file(folder: Path, **serve: Any) -> Path:
    document = changed(SEED_LAYOUT, "ModelDeployParam.ModelParam.modelInstanceType", "StandardMock")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        document["OtherParam"]["ServeParam"] |= {"port": probe.getsockname()[1], **serve}
    return write(folder, document)


def test_check_finds_nothing_wrong_with_what_would_start(tmp_path):
    assert told(mock_file(tmp_path)) == []


def test_check_finds_a_port_that_is_taken_and_an_address_of_elsewhere(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        path = mock_file(tmp_path, port=port, managementPort=1026, managementIpAddress="203.0.113.1")
        found = told(path)
    assert f"port {port} of 127.0.0.1 is in use by another program" in found[0]
    assert found[1] == "managementPort: 203.0.113.1 is not an address of this machine"


def test_check_finds_an_address_of_all_networks_also_for_the_management(tmp_path):
    [found] = told(mock_file(tmp_path, managementPort=1026, managementIpAddress="0.0.0.0"))[:1]
    assert found.startswith("managementIpAddress 0.0.0.0 listens on every network")


def test_check_finds_certificates_that_are_not_there(tmp_path):
    [found] = told(mock_file(tmp_path, httpsEnabled=True, **FIRST_TLS))
    assert found == f"tlsCaFile: {tmp_path}/security/ca/ca.pem cannot be read: No such file or directory"


def test_check_finds_a_model_that_is_not_there_and_a_folder_without_one(tmp_path):
    [missing] = told(write(tmp_path, changed(SEED_LAYOUT, "ModelDeployParam.ModelParam.modelWeightPath", "/not/there")))
    assert missing.startswith("'/not/there' is neither a folder")
    (tmp_path / "empty").mkdir()
    document = changed(SEED_LAYOUT, "ModelDeployParam.ModelParam.modelWeightPath", str(tmp_path / "empty"))
    [empty] = told(write(tmp_path, document))
    assert empty == f"{tmp_path}/empty holds no model: neither .safetensors nor .gguf files are in it"


@pytest.mark.real
def test_check_finds_memory_that_is_not_there_and_heads_that_ranks_cannot_share(tmp_path):
    document = changed(SEED_LAYOUT, "ModelDeployParam.ModelParam.modelWeightPath", "smollm2")
    document = changed(document, "ModelDeployParam.maxSeqLen", 2048)
    document["OtherParam"]["ServeParam"]["port"] = 45671
    [big] = told(write(tmp_path, changed(document, "ModelDeployParam.ModelParam.npuMemSize", 100000)))
    assert "out of memory: kv_cache_bytes (npuMemSize) asks for 100000.00 GB" in big
    ranks = changed(document, "ModelDeployParam.npuDeviceIds", [[0, 1]])
    ranks = changed(changed(ranks, "ModelDeployParam.ModelParam.worldSize", 2), "ModelDeployParam.maxSeqLen", 2048)
    [odd] = told(write(tmp_path, ranks))
    assert "3 KV heads" in odd or "heads" in odd


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run([*CLI, *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_certificates_a_file_and_the_daemon_serve_mutual_tls_at_the_first_try(tmp_path):
    run(tmp_path, "cert", "dev", ".")
    run(tmp_path, "config", "init", "conf/config.json", "--https")
    path = tmp_path / "conf" / "config.json"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    text = path.read_text().replace('"port": 1025', f'"port": {port}').replace('"Standard"', '"StandardMock"', 1)
    path.write_text(text.replace('"modelInstanceType": "Standard"', '"modelInstanceType": "StandardMock"'))
    text = path.read_text().replace('"templateType": "StandardMock"', '"templateType": "Standard"')
    path.write_text(text)
    assert "on https://127.0.0.1" in run(tmp_path, "config", "check", "conf/config.json")
    with serving([*DAEMON], MIES_INSTALL_PATH=str(tmp_path)) as daemon:
        client = tmp_path / "client"
        base = ["curl", "-s", "--cacert", f"{client}/ca.pem"]
        mine = ["--cert", f"{client}/client.pem", "--key", f"{client}/client.key.pem"]
        good = subprocess.run([*base, *mine, f"{daemon.url}/v1/models"], capture_output=True, check=False, timeout=120)
        bad = subprocess.run([*base, f"{daemon.url}/v1/models"], capture_output=True, check=False, timeout=120)
    assert json.loads(good.stdout)["data"][0]["id"] == "smollm2"
    assert bad.returncode != 0


def test_switching_tls_on_without_its_keys_tells_all_of_them(tmp_path):
    path = mock_file(tmp_path, httpsEnabled=True)
    with pytest.raises(UserError) as caught:
        read_settings(path, {})
    lines = str(caught.value).splitlines()
    assert len(lines) == 7
    assert lines[1] == "OtherParam.ServeParam.tlsCaPath: is required when httpsEnabled is true"
