"""Plant bugs in the pure modules, one at a time, and see that the tests catch each: `python tools/mutants.py`.

Exits 1 and names the bugs that no test noticed. A bug whose text is no longer in its file is an error too.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent
ENGINE = "src/kvloom/engine"
TESTS = (
    "test_blocks", "test_scheduler", "test_stop", "test_detok", "test_policies", "test_engine", "test_speculation",
    "test_swap", "test_memory", "test_transfers", "test_kvtier",
)  # fmt: skip


@dataclass(frozen=True)
class Bug:
    what: str
    file: str
    old: str
    new: str


BUGS = (
    Bug("hash forgets what came before", "blocks.py", "sha256(parent + array", "sha256(array"),
    Bug("hash ignores the salt", "blocks.py", "sha256(salt.encode())", "sha256(b'')"),
    Bug("an evicted block is still found", "blocks.py", "            del self._block_of[key]\n", ""),
    Bug(
        "a reused block stays on the free list",
        "blocks.py",
        "                del self._free[block]\n",
        "                pass\n",
    ),
    Bug(
        "a block is freed while someone holds it",
        "blocks.py",
        "if self._refs[block] == 0:\n                self._free[block] = None",
        "if True:\n                self._free[block] = None",
    ),
    Bug("the beginning of a prefix is evicted first", "blocks.py", "in reversed(blocks)", "in blocks"),
    Bug("match skips over a gap", "blocks.py", "                break\n", "                continue\n"),
    Bug("a second block takes over a hash", "blocks.py", " or key in self._block_of", ""),
    Bug(
        "cached blocks are handed out before empty ones",
        "blocks.py",
        "self._free.move_to_end(block, last=False)",
        "pass",
    ),
    Bug("guesses preempt", "scheduler.py", "budget, room)", "budget)"),
    Bug("guesses overrun the step", "scheduler.py", "num_guessing, budget, room", "num_guessing, room"),
    Bug("guesses are not shared", "scheduler.py", "limits.max_draft_tokens // num_guessing", "limits.max_draft_tokens"),
    Bug("a wrong guess counts as computed", "scheduler.py", " - len(step.draft) + max(0, len(tokens) - 1)", ""),
    Bug("wrong guesses keep their blocks", "scheduler.py", "        pool.release(seq.block_table[num_used:])\n", ""),
    Bug("old guesses are used again", "scheduler.py", "        seq.draft = []\n", ""),
    Bug("a prefill guesses", "scheduler.py", " and seq.num_pending == step.num_tokens == 1", ""),
    Bug(
        "a part of the text is never searched",
        "lookup.py",
        "max(self._num_indexed, len(token_ids) - 1)",
        "len(token_ids)",
    ),
    Bug(
        "the first match is taken",
        "lookup.py",
        "self._ends[tuple(token_ids[end - size : end])] = end",
        "self._ends.setdefault(tuple(token_ids[end - size : end]), end)",
    ),
    Bug(
        "the shortest match wins",
        "lookup.py",
        "range(max_tokens, min_tokens - 1, -1)",
        "range(min_tokens, max_tokens + 1)",
    ),
    Bug(
        "a whole cached prompt leaves nothing to compute",
        "scheduler.py",
        "seq.hashes[: (length - 1) // block_size]",
        "seq.hashes",
    ),
    Bug(
        "cached idle blocks are not counted as taken",
        "scheduler.py",
        "taken + _num_blocks(length, block_size)",
        "_num_blocks(length, block_size)",
    ),
    Bug("free blocks are promised twice", "scheduler.py", "        free -= taken + need\n", ""),
    Bug("running sequences' blocks are promised twice", "scheduler.py", "            free -= need\n", ""),
    Bug("a decode waits for older prefills", "scheduler.py", "    budget -= len(share)\n", ""),
    Bug("the oldest is preempted", "scheduler.py", "need > free and end > stop", "need > free and end > 0"),
    Bug("admission goes on in a step that preempts", "scheduler.py", "    if not preempted:\n", "    if True:\n"),
    Bug(
        "waiting sequences overtake each other",
        "scheduler.py",
        "- len(hits) > free:\n            break",
        "- len(hits) > free:\n            continue",
    ),
    Bug(
        "too many sequences run",
        "scheduler.py",
        "places = limits.max_batch - len(running)",
        "places = limits.max_batch",
    ),
    Bug(
        "hits are retained after allocations",
        "scheduler.py",
        "    for hits in (step.hits for steps in (plan.steps, plan.loads) for step in steps):\n        pool.retain(hits)  # all of them before any allocation, which could evict one\n    return [_admit(step, pool) for step in plan.steps]",
        "    works = [_admit(step, pool) for step in plan.steps]\n    for hits in (step.hits for steps in (plan.steps, plan.loads) for step in steps):\n        pool.retain(hits)\n    return works",
    ),
    Bug(
        "a block is published before it is full",
        "scheduler.py",
        "range(seq.num_published, seq.num_computed // block_size)",
        "range(seq.num_published, len(seq.token_ids) // block_size)",
    ),
    Bug(
        "an aborted load gives its blocks back at once",
        "transfers.py",
        "            if now_s >= load.until_s:\n                _wake(load)\n",
        "            if now_s >= load.until_s:\n                _wake(load)\n                self._pool.release(load.transfer.blocks)\n",
    ),
    Bug("blocks of a save are not held", "transfers.py", "                self._pool.retain(blocks)\n", ""),
    Bug(
        "a block that was not loaded is published",
        "transfers.py",
        "zip(blocks[:count], keys[:count], strict=True)",
        "zip(blocks, keys, strict=True)",
    ),
    Bug(
        "a late load wakes who no longer waits for it",
        "transfers.py",
        "seq, load.seq = load.seq, None",
        "seq = load.seq",
    ),
    Bug("an impossible count is believed", "transfers.py", "0 <= report.num_blocks <= len(transfer.blocks)", "True"),
    Bug(
        "the tier is asked again and again",
        "scheduler.py",
        "not (seq.is_asked or seq.host_blocks)",
        "not seq.host_blocks",
    ),
    Bug("one prefix is loaded many times", "scheduler.py", "if missing[0] not in on_the_way:", "if missing:"),
    Bug("blocks of loads are promised twice", "scheduler.py", "                free -= taken + len(missing)\n", ""),
    Bug(
        "loading sequences take no place",
        "scheduler.py",
        "limits.max_batch - len(running) - len(loading)",
        "limits.max_batch - len(running)",
    ),
    Bug(
        "a resumed sequence keeps its old progress",
        "scheduler.py",
        "    seq.num_computed = seq.num_published = 0\n",
        "    seq.num_published = 0\n",
    ),
    Bug(
        "a finished sequence is advanced by its last step",
        "scheduler.py",
        "if seq.status is not Status.RUNNING:",
        "if seq.status is Status.WAITING:",
    ),
    Bug("a static batch is joined", "scheduler.py", "if not limits.is_continuous:", "if False:"),
    Bug("more are preempted than allowed", "scheduler.py", "max(1, end - limits.max_preempt)", "1"),
    Bug("promised blocks are given away", "scheduler.py", "if promised > spare:", "if False:"),
    Bug(
        "what came back from the host is computed again",
        "scheduler.py",
        "max(len(hits) * block_size, seq.num_swapped)",
        "len(hits) * block_size",
    ),
    Bug(
        "a prefix hit is lost by swapping",
        "scheduler.py",
        "max(len(hits) * block_size, seq.num_swapped)",
        "seq.num_swapped or len(hits) * block_size",
    ),
    Bug("the wrong host blocks come back", "scheduler.py", "seq.host_blocks[len(step.hits) :]", "seq.host_blocks"),
    Bug(
        "host blocks leak with their sequence",
        "scheduler.py",
        "        forget_swapped(seq, pool)\n    pool.release",
        "        pass\n    pool.release",
    ),
    Bug(
        "host blocks are promised twice",
        "scheduler.py",
        "            chosen.append(seq)\n            free -= count",
        "            chosen.append(seq)",
    ),
    Bug("a copy is paid one way only", "swap.py", "2 * num_blocks", "num_blocks"),
    Bug("small steps teach what a token costs", "swap.py", "num_tokens >= self.MIN_TOKENS", "num_tokens >= 1"),
    Bug("the reserve is given away", "memory.py", "working_bytes) * SHARE)", "working_bytes))"),
    Bug(
        "prompt and answer share a block",
        "memory.py",
        "-(-num_input // block_size) - (-num_output // block_size)",
        "-(-(num_input + num_output) // block_size)",
    ),
    Bug("the host's pool takes the device's memory", "memory.py", "left - num_blocks * shape.block_bytes", "left"),
    Bug("demotion never ends", "policies.py", "0 < seq.num_preemptions < MAX_DEMOTIONS", "0 < seq.num_preemptions"),
    Bug("prompt log-probabilities are skipped by a cache hit", "scheduler.py", " if seq.may_reuse else []", ""),
    Bug("end-of-sequence before the minimum length", "stop.py", "if num_output >= params.min_tokens:", "if True:"),
    Bug("ignore_eos is ignored", "stop.py", " and not params.ignore_eos", ""),
    Bug("one token too many", "stop.py", "num_output >= params.max_tokens", "num_output > params.max_tokens"),
    Bug("the context overflows by one", "stop.py", "num_total >= max_seq_len", "num_total > max_seq_len"),
    Bug("a possible stop string is given out", "stop.py", "default=0)", "default=0) * 0"),
    Bug(
        "text held back is lost at the end",
        "stop.py",
        'held, self._held = self._held, ""\n',
        'held, self._held = "", ""\n',
    ),
    Bug("half a character is lost at the end", "detok.py", 'decode(b"", final=True)', 'decode(b"")'),
)


def survives(bug: Bug) -> bool:
    """Whether the tests pass with the bug planted in a copy of the sources."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        target = Path(folder) / ENGINE / bug.file
        text = target.read_text()
        if bug.old not in text:
            raise SystemExit(f"{bug.file}: the text of {bug.what!r} is gone; write the bug anew")
        target.write_text(text.replace(bug.old, bug.new))
        tests = [str(ROOT / f"tests/engine/{name}.py") for name in TESTS]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
            "--rootdir",
            str(ROOT),
            *tests,
        ]
        environment = {**os.environ, "PYTHONPATH": f"{folder}/src"}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False).returncode == 0


def main() -> int:
    alive = [bug for bug in track(BUGS, description="planting bugs") if survives(bug)]
    for bug in alive:
        print(f"not caught: {bug.what} ({bug.file})")
    print(f"{len(BUGS) - len(alive)} of {len(BUGS)} planted bugs caught")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
