"""Every figure of docs/gewu.md in one run, JSON lines on stdout.

`python -m benches.gewu.figures [MODEL] [SOAK_S] [DEMOS]`: by default smollm2, a soak of 30 s, 20 runs of the demo.
"""

import sys

from benches.gewu import calls, demo, life


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    soak_s = float(sys.argv[2]) if len(sys.argv) > 2 else 30.0
    num_demos = int(sys.argv[3]) if len(sys.argv) > 3 else 20
    calls.bench(model)
    life.measure(model, soak_s)
    demo.measure(model, num_demos)


if __name__ == "__main__":
    main()
