"""A controller with two ranks: prints a loss and the ranks' process ids, then its ranks never return."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from worker_cases import EndlessLoss, TokenLoss, batch_of, pids, spec_of

from mvp_engine.worker import WorkerGroup

if __name__ == "__main__":
    with WorkerGroup.start(spec_of(), ranks=2, where=sys.argv[1]) as group:
        print("loss", group.update(batch_of(5, 3), TokenLoss(), budget=8)[0].loss, flush=True)
        print("ranks", *pids(group), flush=True)
        group.update(batch_of(5, 3), EndlessLoss(), budget=8)
