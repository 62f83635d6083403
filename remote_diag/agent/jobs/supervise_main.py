"""``python -E -s -S <bundle>/agent/jobs/supervise_main.py <job folder> <pipe> <lock>``: the supervisor's process."""

import os
import sys

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    # The script's folder is first on the path: its modules must not stand for others of the same name.
    sys.path[:] = [os.path.dirname(os.path.dirname(here))] + [
        entry for entry in sys.path if entry and os.path.abspath(entry) != here
    ]
    from agent.jobs.supervise import main  # type: ignore[import-not-found]

    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
