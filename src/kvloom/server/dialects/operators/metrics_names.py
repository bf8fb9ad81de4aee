"""The names of /metrics and the value of each for one model: the documented server's, and vLLM's with its prefix."""

from collections.abc import Callable, Sequence

from kvloom.engine.histogram import Histogram
from kvloom.server.serving.pictures.service import PictureService
from kvloom.server.serving.service import GenerationService


def _kv_use(service: GenerationService) -> float:
    return service.engine.stats().kv_usage


def _host_use(service: GenerationService) -> float:
    stats = service.engine.stats()
    return 1 - stats.num_free_host_blocks / stats.num_host_blocks if stats.num_host_blocks else 0.0


def _hit_rate(service: GenerationService) -> float:
    stats = service.engine.stats()
    return stats.total_cached_tokens / max(1, stats.total_prompt_tokens)


def _failed_share(service: GenerationService) -> float:
    return service.meter.num_failed / max(1, service.meter.num_received)


def _num_waiting(service: GenerationService) -> int:
    return service.engine.stats().num_waiting + service.admission.num_waiting


# names, help, value of a model
Number = Callable[[GenerationService], float]
COUNTERS: Sequence[tuple[tuple[str, ...], str, Number]] = (
    (("request_received",), "Generations asked for.", lambda s: s.meter.num_received),
    (("request_success",), "Generations that ended by themselves.", lambda s: s.meter.prompt_tokens.count),
    (("request_failed",), "Generations that ended with an error.", lambda s: s.meter.num_failed),
    (("request_aborted",), "Generations whose client went away.", lambda s: s.meter.num_aborted),
    (
        ("num_preemptions", "vllm:num_preemptions"),
        "Requests put back for want of KV blocks.",
        lambda s: s.engine.stats().total_preemptions,
    ),
    (
        ("prompt_tokens", "vllm:prompt_tokens"),
        "Prompt tokens of accepted requests.",
        lambda s: s.engine.stats().total_prompt_tokens,
    ),
    (
        ("generation_tokens", "vllm:generation_tokens"),
        "Tokens generated.",
        lambda s: s.engine.stats().total_output_tokens,
    ),
    (("vllm:prefix_cache_queries",), "Prompt tokens looked up.", lambda s: s.engine.stats().total_prompt_tokens),
    (
        ("vllm:prefix_cache_hits", "vllm:prompt_tokens_cached"),
        "Prompt tokens found cached.",
        lambda s: s.engine.stats().total_cached_tokens,
    ),
    (("block_hits",), "Cached KV blocks that requests began with.", lambda s: s.engine.stats().total_block_hits),
    (
        ("window_hits",),
        "Of layers with a sliding window, where these have blocks of their own.",
        lambda s: s.engine.stats().total_window_hits,
    ),
    (
        ("snapshot_hits",),
        "Requests that began with the kept state of another's prefix.",
        lambda s: s.engine.stats().total_snapshot_hits,
    ),
    (
        ("stateless_tokens",),
        "Prompt tokens computed again because their keys were cached, but no state.",
        lambda s: s.engine.stats().total_stateless_tokens,
    ),
    (
        ("windowless_tokens",),
        "Prompt tokens computed again because their keys were cached, but not those of a window.",
        lambda s: s.engine.stats().total_windowless_tokens,
    ),
    (
        ("snapshots_evicted",),
        "Kept states given up for others since the model's process started.",
        lambda s: s.engine.stats().num_evicted_snapshots,
    ),
    (
        ("vllm:spec_decode_num_drafts",),
        "Steps of an answer that had guessed tokens.",
        lambda s: s.engine.stats().total_drafts,
    ),
    (("vllm:spec_decode_num_draft_tokens",), "Tokens guessed ahead.", lambda s: s.engine.stats().total_draft_tokens),
    (
        ("vllm:spec_decode_num_accepted_tokens",),
        "Guesses that the model confirmed.",
        lambda s: s.engine.stats().total_accepted_tokens,
    ),
    (
        ("kv_tier_loaded_blocks",),
        "KV blocks taken from the outer pool since the model's process started.",
        lambda s: s.engine.stats().total_tier_loaded_blocks,
    ),
    (("kv_tier_saved_blocks",), "KV blocks given to it.", lambda s: s.engine.stats().total_tier_saved_blocks),
    (
        ("kv_tier_loaded_states",),
        "States of prefixes taken from it, where layers keep some.",
        lambda s: s.engine.stats().total_tier_loaded_states,
    ),
    (("kv_tier_saved_states",), "States given to it.", lambda s: s.engine.stats().total_tier_saved_states),
    (
        ("kv_tier_loaded_windows",),
        "KV blocks of layers with a sliding window taken from it.",
        lambda s: s.engine.stats().total_tier_loaded_windows,
    ),
    (("kv_tier_saved_windows",), "Such blocks given to it.", lambda s: s.engine.stats().total_tier_saved_windows),
    (
        ("steps_ahead",),
        "Steps planned and sent while the one before them ran.",
        lambda s: s.engine.stats().total_steps_ahead,
    ),
    (
        ("stale_rows",),
        "Tokens computed in steps that were under way when their request ended, or that were planned in vain.",
        lambda s: s.engine.stats().total_stale_rows,
    ),
    (
        ("model_crashes",),
        "Times the model's process died, hung or failed a step.",
        lambda s: s.engine.stats().total_crashes,
    ),
    (
        ("num_requests_resumed",),
        "Times a request went on after such a crash.",
        lambda s: s.engine.stats().total_resumed,
    ),
    (
        ("recomputed_tokens",),
        "Tokens computed again because of crashes.",
        lambda s: s.engine.stats().total_recomputed_tokens,
    ),
    (
        ("num_requests_ended_by_crashes",),
        "Requests ended because the model's process died of them twice.",
        lambda s: s.engine.stats().total_guilty,
    ),
    (("model_restarts",), "Times the model's process was restarted.", lambda s: s.engine.stats().total_restarts),
)
GAUGES: Sequence[tuple[tuple[str, ...], str, Number]] = (
    (
        ("num_requests_running", "vllm:num_requests_running"),
        "Requests in the batch.",
        lambda s: s.engine.stats().num_running,
    ),
    (
        ("num_requests_swapped", "vllm:num_requests_swapped"),
        "Requests that wait with their KV blocks in host memory.",
        lambda s: s.engine.stats().num_swapped,
    ),
    (("num_requests_waiting", "vllm:num_requests_waiting"), "Requests that wait.", _num_waiting),
    (
        ("npu_cache_usage_perc", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "Share of KV blocks in use, 0 to 1.",
        _kv_use,
    ),
    (("cpu_cache_usage_perc", "vllm:cpu_cache_usage_perc"), "Share of host KV blocks in use, 0 to 1.", _host_use),
    (("snapshots",), "States kept for others to begin with.", lambda s: s.engine.stats().num_snapshots),
    (("snapshots_max",), "Most of these.", lambda s: s.engine.stats().max_snapshots),
    (("snapshot_bytes",), "Memory of these.", lambda s: s.engine.stats().snapshot_bytes),
    (
        ("recent_text_bytes",),
        "Memory of the texts of ended requests that later ones are guessed from.",
        lambda s: s.engine.stats().recent_text_bytes,
    ),
    (
        ("decode_step_seconds",),
        "What a step is believed to take that decodes all that run.",
        lambda s: s.engine.stats().decode_step_s,
    ),
    (
        ("prompt_token_seconds",),
        "What a prompt's token is believed to add to a step.",
        lambda s: s.engine.stats().prompt_token_s,
    ),
    (("all_radix_match_num",), "Prompt tokens looked up.", lambda s: s.engine.stats().total_prompt_tokens),
    (("npu_radix_match_hit_num",), "Prompt tokens found cached.", lambda s: s.engine.stats().total_cached_tokens),
    (("npu_prefix_cache_hit_rate",), "Share of prompt tokens found cached, 0 to 1.", _hit_rate),
    (("failed_request_perc",), "Share of generations that failed, 0 to 1.", _failed_share),
)
HISTOGRAMS: Sequence[tuple[tuple[str, ...], str, Callable[[GenerationService], Histogram]]] = (
    (
        ("time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
        "From the request to its first token.",
        lambda s: s.meter.first_token,
    ),
    (
        ("time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds"),
        "Mean time between tokens of a generation.",
        lambda s: s.meter.between_tokens,
    ),
    (
        ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        "Time between two tokens of an answer.",
        lambda s: s.meter.gaps,
    ),
    (("vllm:request_queue_time_seconds",), "Wait for an admission slot.", lambda s: s.meter.queue),
    (("vllm:request_prefill_time_seconds",), "From the admission slot to the first token.", lambda s: s.meter.prefill),
    (("vllm:request_decode_time_seconds",), "From the first token to the last.", lambda s: s.meter.decode),
    (
        ("vllm:request_inference_time_seconds",),
        "From the admission slot to the last token.",
        lambda s: s.meter.inference,
    ),
    (("vllm:e2e_request_latency_seconds",), "From the request to its last token.", lambda s: s.meter.whole),
    (
        ("request_prompt_tokens", "vllm:request_prompt_tokens"),
        "Prompt tokens of a generation.",
        lambda s: s.meter.prompt_tokens,
    ),
    (
        ("request_generation_tokens", "vllm:request_generation_tokens"),
        "Tokens generated for a generation.",
        lambda s: s.meter.output_tokens,
    ),
    (
        ("vllm:request_max_num_generation_tokens",),
        "Tokens of a generation's longest answer.",
        lambda s: s.meter.longest_tokens,
    ),
    (
        ("vllm:request_prefill_kv_computed_tokens",),
        "Prompt tokens of a generation that no cache had.",
        lambda s: s.meter.computed_tokens,
    ),
    (("vllm:request_params_n",), "Answers asked for, of a generation.", lambda s: s.meter.n),
    (("vllm:request_params_max_tokens",), "Tokens asked for at most, where given.", lambda s: s.meter.max_tokens),
    (("vllm:iteration_tokens_total",), "Tokens computed in a step.", lambda s: s.engine.stats().step_tokens),
)
# of models that make pictures: name, help, value
PictureNumber = Callable[[PictureService], float]
PICTURE_COUNTERS: Sequence[tuple[str, str, PictureNumber]] = (
    ("image_requests_received", "Requests for pictures.", lambda s: s.meter.num_received),
    ("image_requests_failed", "Requests for pictures that ended with an error.", lambda s: s.meter.num_failed),
    ("image_requests_aborted", "Requests for pictures whose client went away.", lambda s: s.meter.num_aborted),
    ("images_generated", "Pictures made.", lambda s: s.meter.num_pictures),
    ("image_steps", "Denoising steps computed.", lambda s: s.meter.num_steps),
    ("image_model_restarts", "Times the pipeline's process was restarted.", lambda s: s.painter.num_restarts),
)
PICTURE_GAUGES: Sequence[tuple[str, str, PictureNumber]] = (
    (
        "num_image_requests_running",
        "Requests for pictures that are painted.",
        lambda s: s.admission.num_active - s.admission.num_waiting,
    ),
    ("num_image_requests_waiting", "Requests for pictures that wait.", lambda s: s.admission.num_waiting),
)
