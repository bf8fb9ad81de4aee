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
    num_waiting: int = 0  # sequences that wait for the outer KV tier included
    num_loading: int = 0  # those alone
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_window_blocks: int = 0  # of layers with a window, where these have their own
    num_free_window_blocks: int = 0
    num_cached_blocks: int = 0
    num_evicted_blocks: int = 0  # published blocks handed out for other contents, since the rank started
    num_snapshots: int = 0  # states kept for others to begin with
    max_snapshots: int = 0
    snapshot_bytes: int = 0  # what these take
    num_evicted_snapshots: int = 0  # given up for others, since the rank started
    num_saving_blocks: int = 0  # blocks under way to the outer tier
    num_saving_states: int = 0  # snapshots under way to it, or waiting to be
    num_swapped: int = 0  # sequences that are swapped out to the host
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    max_batch: int = 0
    decode_step_s: float = 0.0  # predicted time of a step that decodes the running sequences; 0 for none
    prompt_token_s: float = 0.0  # predicted time of one more prompt token, without attention
    recent_text_bytes: int = 0  # of the texts of ended requests that later ones are guessed from
    total_steps: int = 0
    total_steps_ahead: int = 0  # of these, planned before the step before them had ended
    total_stale_rows: int = 0  # rows computed in such steps and thrown away: the sequence had ended, or got no token
    total_requests: int = 0
    total_finished: int = 0
    total_prompt_tokens: int = 0
    total_cached_tokens: int = 0
    total_block_hits: int = 0  # cached blocks that requests began with
    total_window_hits: int = 0  # of layers with a window, where these have their own
    total_snapshot_hits: int = 0  # requests that began with the state of a snapshot
    total_stateless_tokens: int = 0  # prompt tokens whose keys were cached, computed again because no state was
    total_windowless_tokens: int = 0  # the same because a window's were not
    total_output_tokens: int = 0
    total_preemptions: int = 0
    total_swapped: int = 0  # of the preemptions, those that were copied to the host
    total_drafts: int = 0  # steps of a sequence that had drafted tokens
    total_draft_tokens: int = 0  # drafted tokens
    total_accepted_tokens: int = 0  # and those that were accepted
    total_compute_s: float = 0.0
    total_tier_loaded_blocks: int = 0  # KV blocks loaded from and saved to the outer tier, since the rank started
    total_tier_saved_blocks: int = 0
    total_tier_loaded_states: int = 0  # and snapshots of states
    total_tier_saved_states: int = 0
    total_tier_loaded_windows: int = 0  # and blocks of layers with a window
    total_tier_saved_windows: int = 0
    total_restarts: int = 0
    total_crashes: int = 0  # times the model's process died, hung or failed a step
    total_resumed: int = 0  # continuations of requests after a rank died; a request may be counted several times
    total_recomputed_tokens: int = 0  # tokens that were computed when it died, and again
    total_guilty: int = 0  # requests that ended because a rank died of them twice
    accepted_by_position: tuple[int, ...] = ()  # drafts of which the first token was accepted, of which the second, ...
    step_tokens: Histogram = field(default_factory=lambda: Histogram(()))  # computed in a step
    batches: tuple[BatchTimes, ...] = ()
    engine_metrics: str = ""  # metrics of a foreign engine, in Prometheus' text format

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that sequences hold, 0 to 1: of the pool that is fuller, if there are two."""
        pools = (self.num_blocks, self.num_free_blocks), (self.num_window_blocks, self.num_free_window_blocks)
        return max(1 - free / count if count else 0.0 for count, free in pools)
