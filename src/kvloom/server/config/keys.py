"""Every key of config.json: type, range, default, meaning, and the setting it becomes. camelCase is used here only.

Layout 1 (spec tables 2-1 to 2-6): OtherParam / WorkFlowParam / ModelDeployParam / ScheduleParam.
Layout 2 (its successor): Version / ServerConfig / BackendConfig / LogConfig; its keys for other processes are in
published.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvloom.contract.config import MAX_COUNT, MAX_CRASH_PATIENCE_S, MAX_GAP_S, MAX_SNAPSHOT_SHARE, WEIGHT_FORMATS
from kvloom.server.config.backends import check_backend
from kvloom.server.config.devices import devices_of
from kvloom.server.config.key import PATH, Key, check_devices, check_gap, check_not_empty, needed
from kvloom.server.config.plugin_options import PLUGIN_KEYS
from kvloom.server.config.published import (
    BACKEND_KEYS,
    LOG_KEYS,
    MODEL_KEYS,
    SCHEDULE_KEYS,
    SERVER_KEYS,
    TOP_KEYS,
)
from kvloom.server.serving.parsers import REASONING_PARSERS, TOOL_PARSERS

_NUMBER = (int, float)
_MODEL_NAME = r"(?=.{1,256}$)[A-Za-z0-9_][A-Za-z0-9_.:-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.:-]*)*"


def _tls(meaning: str, default: str | None, setting: str) -> Key:
    """A path of TLS files; `default` is where `kvloom cert dev` writes them."""
    return Key(str, meaning, setting=setting, longest=PATH, default_https=default)


_SERVE: dict[str, Key] = {
    "ipAddress": needed(str, "127.0.0.1", "address to listen on", setting="host", flag="--host"),
    "port": needed(
        int, 1025, "its port", 1024, 65535, setting="port", flag="--port",
        help="Port to listen on; 0 takes a free one.",
    ),
    "maxLinkNum": needed(int, 300, "requests served at once; twice as many wait", 1, 1000, setting="max_link_num"),
    "httpsEnabled": needed(
        bool, False, "HTTPS with client certificates; needs the tls keys", setting="https", default_https=True
    ),
    "tlsCaPath": _tls("folder of the CA certificates", "security/ca", "tls_ca_path"),
    "tlsCaFile": Key(
        list, "CA certificates that sign clients", setting="tls_ca_files", items=str, longest=PATH,
        default_https=["ca.pem"],
    ),
    "tlsCert": _tls("the server's certificate", "security/certs/server.pem", "tls_cert"),
    "tlsPk": _tls("its private key, encrypted", "security/keys/server.key.pem", "tls_key"),
    "tlsPkPwd": _tls(
        "file of the key's encrypted password", "security/pass/mindie_server_key_pwd.txt", "tls_key_password"
    ),
    "kmcKsfMaster": _tls("key store that decrypts the password", "tools/pmt/master/ksfa", "keystore_master"),
    "kmcKsMaster": _tls("the same under its other name", None, "keystore_master"),
    "kmcKsfStandby": _tls("copy of the key store", "tools/pmt/standby/ksfb", "keystore_standby"),
    "kmcKsStandby": _tls("the same under its other name", None, "keystore_standby"),
    "tlsCrl": _tls("revoked client certificates", "security/certs/server_crl.pem", "tls_crl"),
    "tlsCrlPath": _tls("folder of tlsCrlFiles", None, "tls_crl_path"),
    "tlsCrlFiles": Key(list, "revocation lists in it", setting="tls_crl_files", items=str, longest=PATH),
    "allowAllZeroIpListening": Key(
        bool, "ipAddress may be 0.0.0.0 or ::", setting="allows_all_addresses", flag="--allow-all-addresses",
        help="Let --host be 0.0.0.0 or ::.",
    ),
    "managementIpAddress": Key(str, "address of the status routes, with managementPort", setting="management_host"),
    "managementPort": Key(int, "status routes move to this port", 1024, 65535, setting="management_port"),
    "validateModel": Key(bool, "a wrong model name is a 404, not served by the default", setting="validates_model"),
    "fullTextEnabled": Key(bool, "vLLM streams repeat prompt and whole text each time", setting="is_full_text"),
    "openAiSupport": Key(str, "\"vllm\": /v1 answers run to their end; else 16 tokens", setting="openai_support"),
    "maxInputChars": Key(int, "longest prompt in characters outside /v1", 1, setting="max_input_chars"),
    "tgiRootObject": Key(bool, "POST / answers an object, not an array", setting="is_root_object"),
    "inferEchoInput": Key(bool, "Triton infer puts the prompt before the answer", setting="is_input_echoed"),
    "oipHealthBody": Key(bool, "health bodies of the Open Inference Protocol", setting="has_oip_health"),
    "maxQueuedTokens": Key(int, "prompt tokens served and waiting; more are refused", 1, setting="max_queued_tokens"),
    "maxRequestLength": Key(int, "largest body in MB", 1, 1024, setting="max_body_mb"),
    "tokenTimeout": Key(int, "seconds after which a step counts as hung", 1, 3600, setting="step_timeout_s"),
    "crashPatience": Key(
        _NUMBER, "seconds that requests wait for a model that died; 0: they end", 0, MAX_CRASH_PATIENCE_S,
        setting="crash_patience_s", flag="--crash-patience",
    ),
    "runAhead": Key(
        bool, "send the step after one that decodes while it runs", setting="run_ahead", flag="--run-ahead"
    ),
    "fairTokenMicroseconds": Key(
        int, "what a token costs a key's holder; 0 = keys are not told apart", 0, 10**6, setting="fair_token_us"
    ),
    "kvIdleSeconds": Key(
        _NUMBER, "seconds without work after which the KV cache's memory goes back; 0 = never", 0, 10**7,
        setting="idle_release_s",
    ),
    "apiKeyFile": Key(
        str, "hashes of API keys, one a line (kvloom api-key)", setting="api_key_file", longest=PATH,
        flag="--api-key-file",
    ),
    "loraRoot": Key(
        str, "adapters below it may be loaded at run time", setting="lora_root", longest=PATH, flag="--lora-root"
    ),
    "responseStore": Key(
        str, "file that responses and conversations are kept in", setting="response_store", longest=PATH,
        flag="--response-store", help="Keep responses of /v1/responses in this file.",
    ),
    "responseStoreCount": Key(int, "responses and conversations kept at most", 1, setting="response_store_count"),
    "responseStoreMegabytes": Key(int, "MB of them kept at most", 1, 10**6, setting="response_store_mb"),
    "responseStoreDays": Key(_NUMBER, "days they are kept after use", 0.001, 10**4, setting="response_store_days"),
    "corsOrigins": Key(list, "web origins whose pages may call; none by default", setting="cors_origins", items=str),
    "allowedImageHosts": Key(
        list, "servers that images are fetched from: a.example, *.a.example, * = any public one, or a network",
        setting="image_hosts", items=str, flag="--allowed-image-host",
        help="Server that images are fetched from; may be repeated.",
    ),
    "allowedHosts": Key(
        list, "names it is asked under, a.example or *.a.example; * = any", setting="allowed_hosts", items=str,
        flag="--allowed-host", help="Name to be asked under; may be repeated.",
    ),
    "stopServiceByGet": Key(bool, "GET /stopService stops without keys and managementPort", setting="may_stop_by_get"),
    "otlpEndpoint": Key(str, "collector that traces go to, http://HOST:4318", setting="otlp_endpoint"),
    "metricsPort": Key(
        int, "/metrics moves to this port, on managementIpAddress where that is given", 1024, 65535,
        setting="metrics_port",
    ),
    "e2eTimeout": Key(
        int, "seconds from a request's coming to its end; then it ends with an error", 1, 65535, setting="time_limit_s"
    ),
    "inferMode": Key(str, "one process does prefill and decode", choices=("standard",)),
}  # fmt: skip
_LOG: dict[str, Key] = {
    "logLevel": needed(
        str, "Info", "what is logged", choices=("Verbose", "Info", "Warning", "Error", "None"), setting="log_level",
        flag="--log-level", help="{choices}.",
    ),
    "logPath": needed(
        str, "/logs/mindservice.log", "the log file, under the install folder", setting="log_path", longest=PATH,
        check_more=check_not_empty,
    ),
    "logFileSize": Key(int, "MB of a log file before the next one begins", 1, 500, setting="log_file_mb"),
    "logFileNum": Key(int, "older log files that are kept", 0, 64, setting="log_num_old"),
}  # fmt: skip
_MODEL: dict[str, Key] = {
    "modelInstanceType": Key(
        str, "StandardMock answers without weights", choices=("Standard", "StandardMock"), setting="instance_type",
        default="Standard",
    ),
    "modelName": needed(
        str, "smollm2", "the name that requests use", setting="name", flag="--served-model-name", pattern=_MODEL_NAME,
        form="1 to 256 letters, digits, '-', '_', '.', ':' or '/', a letter, a digit or '_' first and after each '/'",
    ),
    "modelWeightPath": needed(
        str, "smollm2", "a folder, a .gguf file, or the name of a fetched model", setting="model", longest=PATH
    ),
    "worldSize": needed(int, 1, "processes that share the model, tensor parallel", 1, 64, setting="world_size"),
    "cpuMemSize": needed(
        _NUMBER, 0, "GB of memory for what is swapped out; -1 = measured", -1, 1_000_000, setting="cpu_mem_gb"
    ),
    "npuMemSize": needed(
        _NUMBER, -1, "GB for the KV cache; -1 = a share of what is free", -1, 1_000_000, setting="npu_mem_gb"
    ),
    "backendType": needed(
        str, "default", "the back end: default, cpu, torch, mock, vllm or a plug-in; atb and the like count as default",
        setting="backend_type", check_more=check_backend, flag="--backend",
        help="auto, cpu, torch, mock (no weights), or an engine that is installed.",
    ),
    "kvCacheDtype": Key(
        str, "of the KV cache", choices=("auto", "bf16", "int8"), setting="kv_dtype", flag="--kv-dtype",
        help="Of keys and values: {choices}.",
    ),
    "snapshotShare": Key(
        _NUMBER, "of the cache's memory, for states of layers that others may begin with; 0 = no prefix cache there", 0,
        MAX_SNAPSHOT_SHARE, setting="snapshot_share", flag="--snapshot-share",
    ),
    "weightFormat": Key(
        str, "of the CPU kernels", choices=WEIGHT_FORMATS, setting="weight_format", flag="--weight-format",
        help="{choices}.",
    ),
    "draftModel": Key(
        str, "a smaller model of the same vocabulary that guesses ahead too, or mtp", setting="draft_model",
        flag="--draft-model",
        help="A smaller model of the same vocabulary, which guesses ahead: as MODEL; mtp: MODEL's own head.",
    ),
    "weightCache": Key(
        str, "folder that packed weights are kept in, or off", setting="weight_cache", flag="--weight-cache"
    ),
    "deviceType": Key(
        str, "what computes; cuda and npu take the torch backend", choices=("cpu", "cuda", "npu"), setting="device",
        flag="--device", help="{choices}.",
    ),
    "toolParser": Key(
        str, "how the model writes tool calls; auto = as its chat template says", choices=("auto", *TOOL_PARSERS),
        setting="tool_parser",
    ),
    "reasoningParser": Key(
        str, "how the model marks its reasoning; auto = as its chat template says",
        choices=("auto", *REASONING_PARSERS), setting="reasoning_parser",
    ),
    "generationConfig": Key(
        str, "auto: sample as the model's files advise where requests do not say; or none", choices=("auto", "none"),
        setting="generation_config", flag="--generation-config",
    ),
    "parseSpecialTokens": Key(
        bool, "take special tokens in the text of messages for such", setting="parses_special_text",
        flag="--parse-special-tokens",
    ),
    "loraModules": Key(
        list, "LoRA adapters of the start, \"NAME=PATH\" each", setting="lora_modules", items=str,
        flag="--lora-modules", help="LoRA adapter, NAME=PATH; may be repeated.",
    ),
    "imageSteps": Key(
        int, "of a text-to-image model: denoising steps; the pipeline's own by default", 1, 200, setting="image_steps"
    ),
    "imageGuidance": Key(
        _NUMBER, "of the same: weight of the prompt; the pipeline's own by default", 0, 100, setting="image_guidance"
    ),
    "maxImagePixels": Key(
        int, "of the same: pixels of all pictures of a request", 64, 2**30, setting="max_image_pixels"
    ),
    **PLUGIN_KEYS,
    "trustRemoteCode": Key(bool, "model files are never executed", choices=(False,)),
}  # fmt: skip
_POLICIES = "0 first come first served, 1 by state, 3 multi-level feedback queue"
_SCHEDULE: dict[str, Key] = {
    "maxPrefillBatchSize": needed(int, 50, "requests in prefill; 0 = maxBatchSize", 0, setting="max_prefill_batch"),
    "maxPrefillTokens": needed(int, 8192, "tokens of a prefill step", 4096, 409600, setting="max_prefill_tokens"),
    "prefillTimeMsPerReq": needed(
        int, 150, "weight of prefill with supportSelectBatch, ms", 0, 1000, setting="prefill_ms_per_seq"
    ),
    "prefillPolicyType": needed(int, 0, _POLICIES, choices=(0, 1, 3), setting="prefill_policy"),
    "decodeTimeMsPerReq": needed(
        int, 50, "weight of decode with supportSelectBatch, ms", 0, 1000, setting="decode_ms_per_seq"
    ),
    "decodePolicyType": needed(int, 0, _POLICIES, choices=(0, 1, 3), setting="decode_policy"),
    "maxBatchSize": needed(
        int, 200, "most requests computed in one step", 1, 5000, setting="max_batch", flag="--max-batch"
    ),
    "maxIterTimes": needed(int, 512, "longest answer in tokens, below maxSeqLen", 1, setting="max_iter_times"),
    "maxPreemptCount": needed(int, 0, "requests a step may preempt; 0 = never", 0, setting="max_preempt"),
    "maxDecodeGap": Key(
        _NUMBER, "ms that a step may take while somebody streams; 0 = throughput first, -1 = 3 decode steps", -1,
        1000 * MAX_GAP_S, setting="max_gap_ms", default=-1, check_more=check_gap, flag="--max-gap-ms",
        help="Longest step while somebody streams; 0: throughput first, -1: 3 decode steps.",
    ),
    "streamInterval": Key(
        int, "tokens sent together, after a stream's first", 1, 1000, setting="stream_interval", default=1,
        flag="--stream-interval",
    ),
    "supportSelectBatch": needed(bool, False, "weigh prefill against decode", setting="is_selecting"),
    "supportSwapPolicy": Key(bool, "preempted requests are swapped out to cpuMemSize", setting="is_swapping"),
    "numSpeculativeTokens": Key(
        int, "most tokens guessed ahead; -1 as many as pay, 0 is off", -1, 64, setting="num_speculative_tokens",
        default=-1, flag="--speculate",
    ),
    "maxQueueDelayMicroseconds": needed(
        int, 5000, "how long a batch may wait to fill", 500, 1_000_000, setting="max_queue_delay_us"
    ),
}  # fmt: skip
_TEMPLATE: dict[str, Key] = {
    "templateType": needed(str, "Standard", "plain inference", choices=("Standard",)),
    "templateName": needed(
        str, "Standard_llama", "the workflow's name, which the console shows", setting="workflow", longest=256
    ),
    "pipelineNumber": needed(int, 1, "a model has one engine, whatever it says", 1, 10),
}
_RESOURCE: dict[str, Key] = {
    "cacheBlockSize": needed(int, 128, "tokens a KV block", 1, 128, setting="block_size"),
    "preAllocBlocks": needed(int, 4, "KV blocks promised to a request", 0, setting="prealloc_blocks"),
}
_DEVICES = needed(
    list, [[0]], "device numbers of each model, one a rank; on CPUs equal shares of the cores", setting="device_ids",
    check_more=check_devices, read=devices_of, form="a list of lists of whole numbers",
)  # fmt: skip
_DEPLOY: dict[str, Any] = {
    "maxSeqLen": needed(
        int,
        2560,
        "longest prompt and answer together, in tokens",
        2,
        MAX_COUNT,
        setting="max_seq_len",
        flag="--max-seq-len",
    ),
    "npuDeviceIds": _DEVICES,
}
_KV_POOL: dict[str, Key] = {
    "backend": Key(str, "pool that KV blocks outlive the engine in", choices=("", "ems"), setting="kv_pool"),
    "socketPath": Key(
        str, "socket of its agent; without it EMS_SOCKET and the default paths", setting="kv_pool_socket"
    ),
    "timeoutMs": Key(int, "a request waits for its prefix, at most", 1, 60_000, setting="kv_pool_timeout_ms"),
    "accessId": Key(str, "the tenant's id, for a pool with keys", setting="kv_pool_access_id"),
    "accessKeyFile": Key(str, "file with the tenant's access key", setting="kv_pool_access_key_file"),
    "verifyBlocks": Key(bool, "for tests: a wrong byte in the KV cache ends the rank; slow", setting="kv_pool_verify"),
}

LAYOUT_1: Mapping[str, Any] = {
    "OtherParam": {"ResourceParam": _RESOURCE, "LogParam": _LOG, "ServeParam": _SERVE},
    "WorkFlowParam": {"TemplateParam": _TEMPLATE},
    "ModelDeployParam": {**_DEPLOY, "kvPoolConfig": _KV_POOL, "ModelParam": [_MODEL]},
    "ScheduleParam": _SCHEDULE,
}


def _optional(keys: Mapping[str, Key], *but: str) -> dict[str, Key]:
    return {name: key if name in but else replace(key, is_required=False) for name, key in keys.items()}


_SERVE_2 = {
    **_optional(_SERVE),
    "maxLinkNum": replace(_SERVE["maxLinkNum"], high=4096, is_required=False),
    **SERVER_KEYS,
}


def _policy_2(key: Key) -> Key:
    return replace(key, choices=(0, 1, 2, 3), is_required=False)  # 2: by priority, which counts under every policy here


_SCHEDULE_2 = {
    **_optional(_SCHEDULE),
    **_optional(_RESOURCE),
    "templateType": Key(str, "a step takes prefills and decodes together", choices=("Standard", "Mix")),
    "templateName": replace(_TEMPLATE["templateName"], is_required=False),
    "maxPrefillTokens": replace(_SCHEDULE["maxPrefillTokens"], low=1, high=4194304, is_required=False),
    "prefillPolicyType": _policy_2(_SCHEDULE["prefillPolicyType"]),
    "decodePolicyType": _policy_2(_SCHEDULE["decodePolicyType"]),
    **SCHEDULE_KEYS,
}
LAYOUT_2: Mapping[str, Any] = {
    "Version": Key(str, "of the layout", choices=("1.0.0",)),
    "ServerConfig": _SERVE_2,
    "BackendConfig": {
        "backendName": Key(str, "the engine is this one", choices=("mindieservice_llm_engine",)),
        "modelInstanceNumber": Key(int, "a model has one engine", choices=(1,)),
        "npuDeviceIds": replace(_DEVICES, is_required=False),
        "kvPoolConfig": _KV_POOL,
        "tokenizerProcessNumber": Key(
            int, "processes that large bodies are parsed and tokenised in", 1, 32, setting="num_parsers"
        ),
        **BACKEND_KEYS,
        "ModelDeployConfig": {
            "maxSeqLen": replace(_DEPLOY["maxSeqLen"], is_required=False),
            "maxInputTokenLen": Key(int, "longest prompt in tokens", 1, 4194304, setting="max_input_tokens"),
            "truncation": Key(bool, "a prompt that is too long is an error", choices=(False,)),
            "ModelConfig": [{**_optional(_MODEL, "modelName", "modelWeightPath"), **MODEL_KEYS}],
        },
        "ScheduleConfig": _SCHEDULE_2,
    },
    "LogConfig": {**_optional(_LOG), **LOG_KEYS},
    **TOP_KEYS,
}


def keys_of(layout: Any, path: str = "") -> Iterator[tuple[str, Key]]:
    """(JSON path, key) of every key of a layout."""
    if isinstance(layout, Key):
        yield path, layout
        return
    if isinstance(layout, list):
        yield from keys_of(layout[0], f"{path}[]")
        return
    for name, below in layout.items():
        yield from keys_of(below, f"{path}.{name}" if path else name)
