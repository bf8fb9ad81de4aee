"""Stats: a snapshot of what the engine does, for routes, metrics and people."""

from dataclasses import dataclass, field

from kvloom.engine.histogram import Histogram


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """What the steps of one batch size took."""

    num_seqs: int
    num_steps: int = 0
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """Gauges are of this moment, `total_` counters since the engine was made."""

    num_running: int = 0
    num_waiting: int = 0  # those that wait for the outer KV tier too
    num_loading: int = 0  # these alone
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_evicted_blocks: int = 0  # found by a hash and handed out all the same, since the rank started
    num_saving_blocks: int = 0  # on their way to the outer tier
    num_swapped: int = 0  # sequences that wait with their blocks on the host
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    max_batch: int = 0
    decode_step_s: float = 0.0  # what a step that decodes those who run is believed to take; 0 for none
    prompt_token_s: float = 0.0  # what one more token of a prompt is, attention left out
    total_steps: int = 0
    total_steps_ahead: int = 0  # of these, planned before the step in front of them had ended
    total_stale_rows: int = 0  # computed in such steps for sequences that had ended, or had got no token
    total_requests: int = 0
    total_finished: int = 0
    total_prompt_tokens: int = 0
    total_cached_tokens: int = 0
    total_output_tokens: int = 0
    total_preemptions: int = 0
    total_swapped: int = 0  # of the preemptions, those by a copy to the host
    total_draft_tokens: int = 0  # guessed ahead
    total_accepted_tokens: int = 0  # of these the ones that the model chose too
    total_compute_s: float = 0.0
    total_tier_loaded_blocks: int = 0  # KV blocks from and to the outer tier, since the rank started
    total_tier_saved_blocks: int = 0
    total_restarts: int = 0
    total_crashes: int = 0  # times the model's process died, hung or failed a step
    total_resumed: int = 0  # times a request went on that it had died under
    total_recomputed_tokens: int = 0  # that were computed when it died, and again
    total_guilty: int = 0  # requests that ended because a rank died of them twice
    step_tokens: Histogram = field(default_factory=lambda: Histogram(()))  # computed in a step
    batches: tuple[BatchTimes, ...] = ()
    engine_metrics: str = ""  # what an engine of others counts, in Prometheus' text form
