"""Every key of config.json: type, range, default, meaning, and the setting it becomes. camelCase lives here only.

Layout 1 (seed 001, tables 2-1 to 2-6): OtherParam / WorkFlowParam / ModelDeployParam / ScheduleParam.
Layout 2 (its successor): Version / ServerConfig / BackendConfig / LogConfig.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvloom.engine.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Key:
    """One key. Without a `setting` it is checked and has no effect here; the log names it then."""

    type: type | tuple[type, ...]
    meaning: str
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()
    setting: str = ""
    default: Any = None  # what `kvloom config init` writes; None = not written
    is_required: bool = False

    @property
    def allowed(self) -> str:
        """Type and range, for people."""
        if self.choices:
            return ", ".join(map(json.dumps, self.choices))
        types = self.type if isinstance(self.type, tuple) else (self.type,)
        name = " or ".join(_TYPE_NAMES[t] for t in types)
        if self.low is None:
            return name
        return f"{name}, {self.low:g} or more" if self.high is None else f"{name}, {self.low:g} to {self.high:g}"

    def check(self, path: str, value: Any) -> None:
        """Raises BadRequest with the JSON path, the value and what is allowed."""
        types = self.type if isinstance(self.type, tuple) else (self.type,)
        is_wrong = not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
        if is_wrong:
            names = " or ".join(_TYPE_NAMES[t] for t in types)
            raise BadRequest(path, f"must be {names}, got {json.dumps(value)}")
        if self.choices and value not in self.choices:
            raise BadRequest(
                path, f"must be one of {', '.join(map(json.dumps, self.choices))}, got {json.dumps(value)}"
            )
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            limit = f"at least {self.low:g}" if self.high is None else f"between {self.low:g} and {self.high:g}"
            raise BadRequest(path, f"must be {limit}, got {value}")


_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list"}
_NUMBER = (int, float)


def _needed(
    type_: Any, default: Any, meaning: str, low: float | None = None, high: float | None = None, **more: Any
) -> Key:
    return Key(type_, meaning, low, high, default=default, is_required=True, **more)


_SERVE: dict[str, Key] = {
    "ipAddress": _needed(str, "127.0.0.1", "address of the REST interface", setting="host"),
    "port": _needed(int, 1025, "its port", 1024, 65535, setting="port"),
    "maxLinkNum": _needed(int, 300, "requests served at once; twice as many wait", 1, 1000, setting="max_link_num"),
    "httpsEnabled": _needed(bool, False, "HTTPS with client certificates; needs the tls keys", setting="https"),
    "tlsCaPath": Key(str, "folder of the CA certificates", setting="tls_ca_path"),
    "tlsCaFile": Key(list, "CA certificates that sign clients", setting="tls_ca_files"),
    "tlsCert": Key(str, "the server's certificate", setting="tls_cert"),
    "tlsPk": Key(str, "its private key, encrypted", setting="tls_key"),
    "tlsPkPwd": Key(str, "file of the key's encrypted password", setting="tls_key_password"),
    "kmcKsfMaster": Key(str, "key store that decrypts the password", setting="keystore_master"),
    "kmcKsMaster": Key(str, "the same under its other name", setting="keystore_master"),
    "kmcKsfStandby": Key(str, "copy of the key store", setting="keystore_standby"),
    "kmcKsStandby": Key(str, "the same under its other name", setting="keystore_standby"),
    "tlsCrl": Key(str, "revoked client certificates", setting="tls_crl"),
    "allowAllZeroIpListening": Key(bool, "ipAddress may be 0.0.0.0 or ::", setting="allows_all_addresses"),
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
    "fairTokenMicroseconds": Key(
        int, "what a token costs a key's holder; 0 = keys are not told apart", 0, 10**6, setting="fair_token_us"
    ),
    "apiKeyFile": Key(str, "hashes of API keys, one a line", setting="api_key_file"),
    "loraRoot": Key(str, "folder below which LoRA adapters may be loaded at run time", setting="lora_root"),
    "corsOrigins": Key(list, "web origins whose pages may call; none by default", setting="cors_origins"),
    "otlpEndpoint": Key(str, "collector that traces go to, http://HOST:4318", setting="otlp_endpoint"),
    "metricsPort": Key(int, "metrics are on the other ports", 1024, 65535),
    "e2eTimeout": Key(int, "requests end by their own limits", 1),
    "inferMode": Key(str, "one process does prefill and decode", choices=("standard",)),
}  # fmt: skip
_LOG: dict[str, Key] = {
    "logLevel": _needed(
        str, "Info", "what is logged", choices=("Verbose", "Info", "Warning", "Error", "None"), setting="log_level"
    ),
    "logPath": _needed(str, "/logs/mindservice.log", "the log file, under the install folder", setting="log_path"),
}  # fmt: skip
_MODEL: dict[str, Key] = {
    "modelInstanceType": Key(
        str, "StandardMock answers without weights", choices=("Standard", "StandardMock"), setting="instance_type",
        default="Standard",
    ),
    "modelName": _needed(str, "smollm2", "the name that requests use", setting="name"),
    "modelWeightPath": _needed(str, "smollm2", "a folder, a .gguf file or a fetched model's name", setting="model"),
    "worldSize": _needed(int, 1, "processes that share the model, tensor parallel", 1, 64, setting="world_size"),
    "cpuMemSize": _needed(_NUMBER, 0, "GB of memory for what is swapped out; -1 = measured", -1, setting="cpu_mem_gb"),
    "npuMemSize": _needed(_NUMBER, -1, "GB for the KV cache; -1 = a share of what is free", -1, setting="npu_mem_gb"),
    "backendType": _needed(str, "default", "the kernels that are there are taken"),
    "kvCacheDtype": Key(str, "of the KV cache", choices=("auto", "bf16", "int8"), setting="kv_dtype"),
    "weightFormat": Key(str, "of the CPU kernels", choices=("auto", "w8a8", "w4a8", "bf16"), setting="weight_format"),
    "deviceType": Key(
        str, "what computes; cuda and npu take the torch backend", choices=("cpu", "cuda", "npu"), setting="device"
    ),
    "toolParser": Key(
        str, "how the model writes tool calls; auto = as its chat template says",
        choices=("auto", "hermes", "qwen3_coder", "llama3"), setting="tool_parser",
    ),
    "reasoningParser": Key(
        str, "whether answers begin with <think>; auto = as the chat template says", choices=("auto", "think", "none"),
        setting="reasoning_parser",
    ),
    "loraModules": Key(list, "LoRA adapters of the start, \"NAME=FOLDER\" each", setting="lora_modules"),
    "trustRemoteCode": Key(bool, "model files are never executed", choices=(False,)),
}  # fmt: skip
_POLICIES = "0 first come first served, 1 by state, 3 multi-level feedback queue"
_SCHEDULE: dict[str, Key] = {
    "maxPrefillBatchSize": _needed(int, 50, "requests in prefill; 0 = maxBatchSize", 0, setting="max_prefill_batch"),
    "maxPrefillTokens": _needed(int, 8192, "tokens of a prefill step", 4096, 409600, setting="max_prefill_tokens"),
    "prefillTimeMsPerReq": _needed(
        int, 150, "weight of prefill with supportSelectBatch, ms", 0, 1000, setting="prefill_ms_per_seq"
    ),
    "prefillPolicyType": _needed(int, 0, _POLICIES, choices=(0, 1, 3), setting="prefill_policy"),
    "decodeTimeMsPerReq": _needed(
        int, 50, "weight of decode with supportSelectBatch, ms", 0, 1000, setting="decode_ms_per_seq"
    ),
    "decodePolicyType": _needed(int, 0, _POLICIES, choices=(0, 1, 3), setting="decode_policy"),
    "maxBatchSize": _needed(int, 200, "requests in a step", 1, 5000, setting="max_batch"),
    "maxIterTimes": _needed(int, 512, "longest answer in tokens, below maxSeqLen", 1, setting="max_iter_times"),
    "maxPreemptCount": _needed(int, 0, "requests a step may preempt; 0 = never", 0, setting="max_preempt"),
    "supportSelectBatch": _needed(bool, False, "weigh prefill against decode", setting="is_selecting"),
    "numSpeculativeTokens": Key(
        int, "tokens guessed ahead from the prompt; 0 = off", 0, 64, setting="num_speculative_tokens"
    ),
    "maxQueueDelayMicroseconds": _needed(
        int, 5000, "how long a batch may wait to fill", 500, 1_000_000, setting="max_queue_delay_us"
    ),
}  # fmt: skip
_TEMPLATE: dict[str, Key] = {
    "templateType": _needed(str, "Standard", "plain inference", choices=("Standard",)),
    "templateName": _needed(str, "Standard_llama", "a name for the workflow"),
    "pipelineNumber": _needed(int, 1, "workflows", 1, 10),
}
_RESOURCE: dict[str, Key] = {
    "cacheBlockSize": _needed(int, 128, "tokens a KV block", 1, 128, setting="block_size"),
    "preAllocBlocks": _needed(int, 4, "KV blocks promised to a request", 0, setting="prealloc_blocks"),
}
_DEPLOY: dict[str, Any] = {
    "maxSeqLen": _needed(int, 2560, "longest prompt and answer together, in tokens", 1, setting="max_seq_len"),
    "npuDeviceIds": _needed(list, [[0]], "device numbers of each model"),
}
_KV_POOL: dict[str, Key] = {
    "backend": Key(str, "pool that KV blocks outlive the engine in", choices=("", "ems"), setting="kv_pool"),
    "socketPath": Key(str, "socket of its agent; without it EMS_SOCKET and the usual places", setting="kv_pool_socket"),
    "timeoutMs": Key(int, "a request waits for its prefix, at most", 1, 60_000, setting="kv_pool_timeout_ms"),
    "accessId": Key(str, "the tenant's id, for a pool with keys", setting="kv_pool_access_id"),
    "accessKeyFile": Key(str, "file with the tenant's access key", setting="kv_pool_access_key_file"),
}

LAYOUT_1: Mapping[str, Any] = {
    "OtherParam": {"ResourceParam": _RESOURCE, "LogParam": _LOG, "ServeParam": _SERVE},
    "WorkFlowParam": {"TemplateParam": _TEMPLATE},
    "ModelDeployParam": {**_DEPLOY, "kvPoolConfig": _KV_POOL, "ModelParam": [_MODEL]},
    "ScheduleParam": _SCHEDULE,
}


def _optional(keys: Mapping[str, Key], *but: str) -> dict[str, Key]:
    return {name: key if name in but else replace(key, is_required=False) for name, key in keys.items()}


LAYOUT_2: Mapping[str, Any] = {
    "Version": Key(str, "of the layout"),
    "ServerConfig": _optional(_SERVE),
    "BackendConfig": {
        "backendName": Key(str, "the engine is this one"),
        "modelInstanceNumber": Key(int, "processes of a model", choices=(1,)),
        "npuDeviceIds": Key(list, "device numbers of each model"),
        "kvPoolConfig": _KV_POOL,
        "tokenizerProcessNumber": Key(int, "tokenizers run in the server's process", 1, 32),
        "ModelDeployConfig": {
            **_optional(_DEPLOY),
            "maxInputTokenLen": Key(int, "prompts are bounded by maxSeqLen and maxIterTimes", 1),
            "truncation": Key(bool, "a prompt that is too long is an error", choices=(False,)),
            "ModelConfig": [_optional(_MODEL, "modelName", "modelWeightPath")],
        },
        "ScheduleConfig": {
            **_optional(_SCHEDULE),
            **_optional(_TEMPLATE),
            **_optional(_RESOURCE),
            "maxFirstTokenWaitTime": Key(int, "the policies bound the wait", 0),
        },
    },
    "LogConfig": _optional(_LOG),
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
