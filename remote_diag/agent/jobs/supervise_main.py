"""``python -E -s -S <bundle>/agent/jobs/supervise_main.py <job folder> <pipe> <lock>``: the supervisor's process."""

import os
import sys

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    bundle = os.path.dirname(os.path.dirname(here))
    # The script's folder is first on the path: its modules must not stand for others of the same name.
    sys.path[:] = [bundle] + [entry for entry in sys.path if entry and os.path.abspath(entry) != here]
    # Until it is known whether there is room for compiled files.
    sys.dont_write_bytecode = True
    from agent import bytecode  # type: ignore[import-not-found]

    def _supervise() -> int:
        from agent.jobs.supervise import main  # type: ignore[import-not-found]

        status: int = main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
        return status

    sys.exit(bytecode.run(_supervise, bundle))
