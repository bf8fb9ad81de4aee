"""One valid request of every route, in every dialect: the cases of the golden files and the seeds of mutations."""

from dataclasses import dataclass, field
from typing import Any

MODEL = "llama_65b"
PROMPT = "My name is Olivier and I"
_V2 = f"/v2/models/{MODEL}"
_TGI = {"inputs": PROMPT, "parameters": {"max_new_tokens": 4, "seed": 7, "temperature": 0.5, "details": True}}
_PREFILL = {**_TGI, "parameters": {**_TGI["parameters"], "decoder_input_details": True}}
_VLLM = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0.5, "seed": 7, "stop": ["zz"], "top_k": 10}
_CHAT = {
    "model": MODEL,
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "what is your hobby?"}],
    "max_tokens": 4,
    "seed": 7,
    "temperature": 0.5,
}
_TEXT = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "seed": 7, "temperature": 0.5}
_RESPONSE = {"model": MODEL, "instructions": "Be brief.", "input": "hi", "max_output_tokens": 3, "seed": 7}
_ITEMS = [{"role": "user", "content": "hi"}]
_MESSAGE = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 7}
_OLLAMA: dict[str, Any] = {"model": f"{MODEL}:latest", "options": {"num_predict": 3, "seed": 7, "stop": ["zz"]}}
_OLLAMA_CHAT = {**_OLLAMA, "messages": [{"role": "user", "content": "hi"}]}
_RERANK = {"model": MODEL, "query": "what is a cat?", "documents": ["a car", {"text": "an animal"}, "a dog"]}
_DECISIONS = {
    "model": MODEL,
    "input": "I was charged twice.",
    "questions": [
        {"type": "predicate", "name": "angry", "instructions": "Is the customer angry?"},
        {"type": "choice", "instructions": "Which?", "choices": [{"value": "a", "description": "x"}, {"value": True}]},
        {"type": "score", "instructions": "How urgent?", "levels": [{"label": "low"}, {"label": "high"}]},
    ],
}
_SYSTEMONE = {
    "model": MODEL,
    "state": {"text": "I was charged twice."},
    "temperature": 2,
    "questions": {
        "angry": {"type": "noul", "instructions": "Is the customer angry?", "criteria": {"true": "He shouts."}},
        "team": {"type": "choice", "instructions": "Which?", "criteria": {"a": "x", "b": None}},
        "urgency": {"type": "score", "instructions": "How urgent?", "criteria": ["low", "high"]},
    },
}
_EMBEDDING = {"model": MODEL, "input": [[104, 105], [106]]}
_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
_TRITON = {"id": "a123", "text_input": PROMPT, "parameters": {"max_new_tokens": 4, "seed": 7, "details": True}}
_TENSOR = {
    "id": "42",
    "inputs": [
        {
            "name": "input0",
            "shape": [1, 3],
            "datatype": "UINT32",
            "data": [104, 105, 33],
            "parameters": {"max_new_tokens": 4, "seed": 7, "temperature": 0.5},
        }
    ],
    "outputs": [{"name": "output0"}],
}
_NATIVE = {"inputs": PROMPT, "parameters": {"max_new_tokens": 4, "seed": 7, "temperature": 0.5, "details": True}}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    method: str
    path: str
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)


def _get(name: str, path: str, **headers: str) -> Case:
    return Case(name, "GET", path, None, headers)


def _post(name: str, path: str, body: Any) -> Case:
    return Case(name, "POST", path, body)


CASES = [
    _get("tgi-health", "/health"),
    _get("tgi-root", "/"),
    _get("tgi-ping", "/ping"),
    *(_get(f"health-{path[1:]}", path) for path in ("/healthz", "/livez", "/readyz")),
    _post("health-ping", "/ping", None),
    _get("tgi-info", "/info"),
    _post("tgi-compat", "/", _PREFILL),
    _post("tgi-compat-stream", "/", {**_TGI, "stream": True}),
    _post("tgi-generate", "/generate", _PREFILL),
    _post("tgi-generate-plain", "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 4}}),
    _post("tgi-generate-stream", "/generate_stream", _TGI),
    _post("tgi-invocations", "/invocations", _TGI),
    _post("tgi-error", "/generate", {"inputs": PROMPT, "parameters": {"top_p": 1.0}}),
    _post("tgi-error-stream", "/generate_stream", {"inputs": ""}),
    _post("vllm-generate", "/generate", _VLLM),
    _post("vllm-generate-n", "/generate", {**_VLLM, "n": 2}),
    _post("vllm-generate-stream", "/generate", {**_VLLM, "stream": True}),
    _post("vllm-error", "/generate", {**_VLLM, "top_k": 0}),
    _post("generate-error-neither", "/generate", {"text": PROMPT}),
    _get("openai-models", "/v1/models"),
    _get("openai-model", f"/v1/models/{MODEL}"),
    _post("lora-load-error", "/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "sql"}),
    _post("lora-unload-error", "/v1/unload_lora_adapter", {"lora_name": "sql"}),
    _get("openai-model-error", "/v1/models/other"),
    _post("openai-chat", "/v1/chat/completions", _CHAT),
    _post("openai-chat-n-logprobs", "/v1/chat/completions", {**_CHAT, "n": 2, "logprobs": True, "top_logprobs": 1}),
    _post("openai-chat-stream", "/v1/chat/completions", {**_CHAT, "seed": 8, "stream": True}),
    _post("openai-chat-stream-usage", "/v1/chat/completions", {**_CHAT, "seed": 8, **_USAGE}),
    _post("openai-chat-error", "/v1/chat/completions", {**_CHAT, "temperature": 3}),
    _post("openai-chat-error-model", "/v1/chat/completions", {**_CHAT, "model": "other"}),
    _post("openai-chat-error-stream", "/v1/chat/completions", {**_CHAT, "stream": True, "n": 0}),
    _post("openai-completion", "/v1/completions", _TEXT),
    _post("openai-completion-echo", "/v1/completions", {**_TEXT, "prompt": [104, 105], "echo": True, "logprobs": 1}),
    _post("openai-completion-stream", "/v1/completions", {**_TEXT, **_USAGE}),
    _post("openai-kv-transfer-error", "/v1/completions", {**_TEXT, "kv_transfer_params": {"do_remote_decode": True}}),
    _post("openai-completion-error", "/v1/completions", {"model": MODEL}),
    _post("openai-images-error", "/v1/images/generations", {"prompt": PROMPT, "response_format": "url"}),
    _post("openai-images-error-model", "/v1/images/generations", {"model": MODEL, "prompt": PROMPT}),
    _post("responses", "/v1/responses", _RESPONSE),
    _post("responses-stream", "/v1/responses", {**_RESPONSE, "stream": True}),
    _post("responses-error", "/v1/responses", {**_RESPONSE, "previous_response_id": "resp_1"}),
    _get("responses-retrieve-error", "/v1/responses/resp_1"),
    Case("responses-delete-error", "DELETE", "/v1/responses/resp_1"),
    _post("responses-cancel-error", "/v1/responses/resp_1/cancel", None),
    _get("responses-input-error", "/v1/responses/resp_1/input_items"),
    _post("conversations-error", "/v1/conversations", {"metadata": {"a": "b"}, "items": _ITEMS}),
    _get("conversation-error", "/v1/conversations/conv_1"),
    _post("conversation-update-error", "/v1/conversations/conv_1", {"metadata": {"a": "b"}}),
    Case("conversation-delete-error", "DELETE", "/v1/conversations/conv_1"),
    _get("conversation-items-error", "/v1/conversations/conv_1/items?limit=3"),
    _post("conversation-add-error", "/v1/conversations/conv_1/items", {"items": _ITEMS}),
    _get("conversation-item-error", "/v1/conversations/conv_1/items/msg_1"),
    Case("conversation-remove-error", "DELETE", "/v1/conversations/conv_1/items/msg_1"),
    _post("messages", "/v1/messages", _MESSAGE),
    _post("responses-count", "/v1/responses/input_tokens", {"model": MODEL, "input": "hi"}),
    _post("responses-compact", "/v1/responses/compact", {"model": MODEL, "input": "hi"}),
    _post("load-model", "/load_model", {"model": MODEL}),
    _post("messages-stream", "/v1/messages", {**_MESSAGE, "stream": True}),
    _post("messages-count", "/v1/messages/count_tokens", {"model": MODEL, "messages": _MESSAGE["messages"]}),
    _post("messages-error", "/v1/messages", {**_MESSAGE, "max_tokens": -1}),
    _post("ollama-chat", "/api/chat", {**_OLLAMA_CHAT, "stream": False, "logprobs": True}),
    _post("ollama-chat-stream", "/api/chat", _OLLAMA_CHAT),
    _post("ollama-chat-load", "/api/chat", {"model": MODEL}),
    _post("ollama-chat-error", "/api/chat", {**_OLLAMA_CHAT, "options": {"mirostat": 2}}),
    _post("ollama-chat-error-model", "/api/chat", {**_OLLAMA_CHAT, "model": "other"}),
    _post("ollama-generate", "/api/generate", {**_OLLAMA, "prompt": "hi", "stream": False}),
    _post("ollama-generate-stream", "/api/generate", {**_OLLAMA, "prompt": "hi", "raw": True, "keep_alive": "5m"}),
    _post("ollama-embed", "/api/embed", {"model": MODEL, "input": ["hi", "there"], "dimensions": 2}),
    _post("ollama-embeddings", "/api/embeddings", {"model": MODEL, "prompt": "hi"}),
    _get("ollama-version", "/api/version"),
    _get("ollama-tags", "/api/tags"),
    _get("ollama-ps", "/api/ps"),
    _post("ollama-show", "/api/show", {"model": MODEL}),
    _post("ollama-show-error", "/api/show", {"model": "other"}),
    *(_post(f"ollama-{name}", f"/api/{name}", {"model": MODEL}) for name in ("pull", "push", "create", "copy")),
    Case("ollama-delete", "DELETE", "/api/delete", {"model": MODEL}),
    _post("ollama-blobs", "/api/blobs/sha256:00", {}),
    _post("embeddings", "/v1/embeddings", {"model": MODEL, "input": ["hi", "there"]}),
    _post("embeddings-base64", "/v1/embeddings", {**_EMBEDDING, "encoding_format": "base64", "dimensions": 3}),
    _post("embeddings-error", "/v1/embeddings", {**_EMBEDDING, "dimensions": 9}),
    _post("rerank", "/v1/rerank", _RERANK),
    _post("rerank-cohere", "/v2/rerank", {**_RERANK, "top_n": 2}),
    _post("rerank-short", "/rerank", {**_RERANK, "return_documents": False, "instruction": "Find the answer."}),
    _post("rerank-error", "/v1/rerank", {**_RERANK, "max_tokens_per_doc": 9}),
    _post("rerank-error-empty", "/v1/rerank", {**_RERANK, "documents": []}),
    _post("decisions", "/v1/decisions", _DECISIONS),
    _post("decisions-error", "/v1/decisions", {**_DECISIONS, "questions": [{"type": "box", "instructions": "?"}]}),
    _post("systemone", "/v1/systemone", _SYSTEMONE),
    _post("systemone-error", "/v1/systemone", {**_SYSTEMONE, "stream": True}),
    _post("classify-error", "/classify", {"model": MODEL, "input": "what is a cat?"}),
    _post("classify-error-v1", "/v1/classify", {"model": MODEL, "input": "what is a cat?"}),
    _post("score", "/v1/score", {"model": MODEL, "text_1": "what is a cat?", "text_2": ["an animal", "a car"]}),
    _post("score-short", "/score", {"model": MODEL, "text_1": ["a", "b"], "text_2": ["c", "d"]}),
    _post("score-error", "/score", {"model": MODEL, "text_1": ["a", "b"], "text_2": "c"}),
    _post("tokenize-prompt", "/tokenize", {"model": MODEL, "prompt": "hi!", "return_token_strs": True}),
    _post("tokenize-messages", "/tokenize", {"model": MODEL, "messages": _CHAT["messages"]}),
    _post("tokenize-error", "/tokenize", {"model": MODEL}),
    _post("detokenize", "/detokenize", {"model": MODEL, "tokens": [104, 105, 257]}),
    _post("detokenize-error", "/detokenize", {"model": MODEL, "tokens": [104, 258]}),
    _get("openai-error-route", "/v1/nothing"),
    _get("openai-short-models", "/models"),
    _post("openai-short-completion", "/completions", _TEXT),
    _post("openai-short-error", "/chat/completions", {**_CHAT, "temperature": 3}),
    _get("tokenizer-info", "/tokenizer_info"),
    _get("tokenizer-info-error", "/tokenizer_info?model=other"),
    _post("vllm-render-chat", "/v1/chat/completions/render", _CHAT),
    _post("vllm-render-chat-error", "/v1/chat/completions/render", {**_CHAT, "model": "other"}),
    _post("vllm-render", "/v1/completions/render", {**_TEXT, "prompt": ["hi", "ho"]}),
    _post("vllm-render-error", "/v1/completions/render", {**_TEXT, "temperature": 3}),
    _get("sglang-health-generate", "/health_generate"),
    _get("sglang-model-info", "/model_info"),
    _get("sglang-get-model-info", "/get_model_info"),
    _get("sglang-get-server-info", "/get_server_info"),
    _get("sglang-get-load", "/get_load"),
    _post("sglang-flush-cache", "/flush_cache", None),
    _get("vllm-version", "/version"),
    _get("vllm-load", "/load"),
    _get("vllm-server-info-error", "/server_info?config_format=xml"),
    _post("vllm-reset", "/reset_prefix_cache?reset_running_requests=true", None),
    _post("vllm-reset-error", "/reset_prefix_cache?reset_external=maybe", None),
    _post("vllm-sleep-error", "/sleep?level=0", None),
    _post("vllm-sleep-error-mode", "/sleep?mode=keep", None),
    _get("vllm-is-sleeping", "/is_sleeping"),
    _post("vllm-wake-up", "/wake_up", None),
    _post("vllm-wake-up-error", "/wake_up?tags=heads", None),
    _get("triton-server", "/v2"),
    _get("triton-server-oip", "/v2?format=oip"),
    _get("triton-live", "/v2/health/live"),
    _get("triton-live-oip", "/v2/health/live", Accept="application/json; oip"),
    _get("triton-ready", "/v2/health/ready"),
    _get("triton-model", _V2),
    _get("triton-model-ready", f"{_V2}/ready"),
    _get("triton-model-version", f"{_V2}/versions/1"),
    _get("triton-model-error-version", f"{_V2}/versions/2"),
    _get("triton-model-error", "/v2/models/other"),
    _get("triton-config", f"{_V2}/config"),
    _get("triton-slots", f"{_V2}/getSlotCount"),
    _get("triton-stats-error", "/v2/models/other/stats"),
    _get("triton-stats-error-version", f"{_V2}/versions/2/stats"),
    _post("triton-index", "/v2/repository/index", {"ready": True}),
    _post("triton-index-error", "/v2/repository/index", {"ready": 3}),
    _post("triton-load-error", f"/v2/repository/models/{MODEL}/load", {"parameters": {"config": "{}"}}),
    _post("triton-unload-error", "/v2/repository/models/other/unload", {}),
    _post("triton-infer", f"{_V2}/infer", _TENSOR),
    _post("triton-infer-error", f"{_V2}/infer", {**_TENSOR, "inputs": []}),
    _post("triton-generate", f"{_V2}/generate", _TRITON),
    _post("triton-generate-version", f"{_V2}/versions/1/generate", {"text_input": PROMPT, "id": "a1"}),
    _post("triton-generate-stream", f"{_V2}/generate_stream", _TRITON),
    _post("triton-generate-error", f"{_V2}/generate", {"text_input": PROMPT, "parameters": {"temperature": -1}}),
    _post("triton-stop-error", f"{_V2}/stopInfer", {"id": "gone"}),
    _post("native-infer", "/infer", _NATIVE),
    _post("native-infer-stream", "/infer", {**_NATIVE, "stream": True}),
    _post("native-infer-error", "/infer", {"inputs": 3}),
    _post("native-infer-token", "/infer_token", {"input_id": [104, 105], "parameters": {"max_new_tokens": 4}}),
    _get("status-health-timed", "/health/timed"),
    _get("status-health-timed-1", "/health/timed-1"),
    _get("status-health-timed-error", "/health/timed-601"),
    _get("status-config", "/v1/config"),
    _get("status-v1", "/v1/status"),
    _get("status-v2", "/v2/status"),
    _get("status-metrics", "/metrics-json"),
    _post("status-tokenizer", "/v1/tokenizer", {"inputs": "hi", "do_tokenize": True}),
    *(
        _get(f"triton-version{path.replace('/', '-')}", f"{_V2}/versions/1{path}")
        for path in ("/ready", "/config", "/getSlotCount")
    ),
    _post("triton-version-infer", f"{_V2}/versions/1/infer", {**_TENSOR, "parameters": {"details": True}}),
    _post("triton-version-generate-stream", f"{_V2}/versions/1/generate_stream", {**_TRITON, "id": "a124"}),
    _post("triton-version-stop-error", f"{_V2}/versions/1/stopInfer", {"id": "a b"}),
    _get("error-route", "/nothing"),
    _get("error-method", "/generate"),
]
