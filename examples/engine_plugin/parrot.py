"""An engine plug-in for kvloom's server, which repeats the prompt. `kvloom serve FOLDER --backend parrot`."""

from kvloom.contract.errors import BadRequest
from kvloom.contract.messages import RankInfo
from kvloom.contract.request import Delta, FinishReason, check_request
from kvloom.engine.feed import Feed, Feeds
from kvloom.engine.stats import Stats
from kvloom.engine.text.detok import Detokenizer, text_bytes

LACKS = {name: "a parrot has none" for name in ("grammar", "logprobs", "pooling", "prompt_logprobs", "stop")}


class Parrot:
    """An EngineLike (kvloom/server/serving/engine.py) whose requests end as soon as they are opened."""

    is_ready, max_seq_len = True, 2048

    def __init__(self, vocabulary):
        self.vocabulary, self.feeds = vocabulary, Feeds()
        self.info = RankInfo(0, 16, vocabulary.vocab_size, self.max_seq_len, "parrot", lacks=LACKS)

    def start(self, loop): ...
    def close(self): ...
    def check_ready(self): ...
    def stats(self):
        return Stats()

    def open(self, requests):
        for request in requests:
            check_request(request, self.max_seq_len, self.info.vocab_size)
        feed = Feed(requests, self.feeds.leave)
        self.feeds.add(feed)
        for request in requests:
            self.feeds.put([(request.id, delta) for delta in self._deltas(request)])
        return feed

    async def stream(self, request):
        with self.open([request]) as feed:
            while (step := await feed.get()) is not None:
                for _, delta in step:
                    yield delta

    def _deltas(self, request):
        """One delta a token, then one that always has a finish_reason."""
        answer = request.prompt_ids[: request.params.max_tokens]
        detok = Detokenizer(text_bytes(self.vocabulary, request.params.skip_special_tokens))
        yield from (Delta(request.id, detok.add(token), (token,)) for token in answer)
        whole = len(answer) == len(request.prompt_ids)
        yield Delta(request.id, finish_reason=FinishReason.STOP if whole else FinishReason.LENGTH)

    def abort(self, request_id): ...  # all requests have already ended
    def unload_adapter(self, adapter): ...
    async def reset_prefix_cache(self, preempts): ...
    async def sleep(self): ...
    async def wake(self, wants_same_weights): ...
    def preload_adapter(self, path):
        raise BadRequest("lora_path", "a parrot takes no adapters")

    async def load_adapter(self, path):
        self.preload_adapter(path)


def open_engine(config, vocabulary, progress=None):
    """The entry point: an EngineFactory."""
    return Parrot(vocabulary())
