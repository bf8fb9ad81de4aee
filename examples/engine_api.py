"""The engine as a library: requests from a CSV of token ids, a callback for every token, figures at the end.

`python examples/engine_api.py CONFIG.json DATASET.csv [1]`; with 1 the answers are written to token_output.csv.
The sample program of the Engine API (spec 3.2), in Python.
"""

import csv
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvloom.engine_api import InferenceEngine, InferenceRequest, InferenceResponse, InferResponseEndFlag


@dataclass
class Metrics:
    """The times of one request, in seconds, and its numbers of tokens."""

    num_input: int
    started_s: float
    first_token_s: float = 0.0
    last_token_at_s: float = 0.0
    decode_s: list[float] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    flag: InferResponseEndFlag = InferResponseEndFlag.INFER_RESPONSE_CONTINUE


class Sample:
    """Sends requests as the quotas allow and collects the responses."""

    def __init__(self) -> None:
        self.metrics: dict[str, Metrics] = {}
        self.all_done = threading.Condition()
        self.num_complete = 0

    def on_response(self, response: InferenceResponse) -> None:
        """The callback, called once for each token. A status that is not ok has the reason."""
        name, now_s = response.GetRequestId().StringValue(), time.perf_counter()
        status, attributes = response.ImmutableOutput("IBIS_EOS_ATTR")
        status_ids, output = response.ImmutableOutput("OUTPUT_IDS")
        if not status.IsOk() or not status_ids.IsOk() or attributes is None or output is None:
            print(f"ReqId:{name}, Error:{status.StatusMsg() or status_ids.StatusMsg()}")
            return
        flag, num_tokens = attributes.Buffer()
        metrics = self.metrics[name]
        if num_tokens:
            if not metrics.output_ids:
                metrics.first_token_s = now_s - metrics.started_s
            else:
                metrics.decode_s += [(now_s - metrics.last_token_at_s) / num_tokens] * int(num_tokens)
            metrics.last_token_at_s = now_s
            metrics.output_ids += output.Buffer().tolist()
        if response.IsEOS():
            metrics.flag = InferResponseEndFlag(flag)
            with self.all_done:
                self.num_complete += 1
                self.all_done.notify()
            print(f"ReqId:{name} Finished")

    def send(self, engine: InferenceEngine, prompts: list[list[int]]) -> None:
        """Send prompts as blocks, batch slots and prefill tokens become free."""
        waiting = list(enumerate(prompts))
        while waiting:
            _, quotas = engine.GetRequestBlockQuotas()
            _, num_processing = engine.GetProcessingRequest()
            _, max_batch_size = engine.GetMaxBatchSize()
            slots = min(quotas.remain_prefill_slots, max_batch_size - num_processing)
            while waiting and slots > 0 and min(quotas.remain_blocks, quotas.remain_prefill_tokens) > 0:
                index, prompt = waiting.pop(0)
                request = InferenceRequest(f"{index}")
                request.set_input_ids(prompt)
                request.SetMaxOutputLen(16)
                self.metrics[f"{index}"] = Metrics(len(prompt), time.perf_counter())
                status = engine.Forward(request)
                if not status.IsOk():
                    raise SystemExit(f"ReqId:{index}: {status.StatusMsg()}")
                slots -= 1
                _, quotas = engine.GetRequestBlockQuotas()
            time.sleep(0.002)

    def wait(self, num_requests: int) -> None:
        with self.all_done:
            self.all_done.wait_for(lambda: self.num_complete >= num_requests)


def main(config: str, dataset: str, records: bool) -> None:
    with Path(dataset).open(newline="") as rows:
        prompts = [[int(value) for value in row] for row in csv.reader(rows)]
    sample, engine = Sample(), InferenceEngine()
    status = engine.Init(sample.on_response, config)
    if not status.IsOk():
        raise SystemExit(f"engine init failed: {status.StatusMsg()}")
    started_s = time.perf_counter()
    sample.send(engine, prompts)
    sample.wait(len(prompts))
    elapsed_s = time.perf_counter() - started_s
    found = sample.metrics.values()
    num_tokens = sum(len(metrics.output_ids) for metrics in found)
    first_ms = 1000 * sum(metrics.first_token_s for metrics in found) / len(found)
    rate = num_tokens / elapsed_s
    print(f"{len(prompts)} requests, {num_tokens} tokens, {rate:.1f} tok/s, first token {first_ms:.1f} ms")
    if records:
        with Path("token_output.csv").open("w", newline="") as out:
            csv.writer(out).writerows(sample.metrics[str(index)].output_ids for index in range(len(prompts)))
    print(f"inferenceEngine finalize message is : {engine.Finalize().StatusMsg()}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], records=sys.argv[3:] == ["1"])
