"""The probe's process starts here: ``python <bundle>/agent/probe_main.py <run directory>``.

The agent adds how to reach it. Without that, a run that was kept is run again by hand; the answer goes to
``result.json`` in its directory.
"""

import os
import sys


def _main() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    bundle = os.path.dirname(here)
    if sys.path and os.path.abspath(sys.path[0]) == here:
        # Our module names must not stand for those of the environment.
        del sys.path[0]
    sys.path.append(bundle)
    # Under names of our own choice, whatever packages called ``agent`` or ``probes`` the environment has.
    for name, folder in (("_rdiag_agent", here), ("probes", os.path.join(bundle, "probes"))):
        package = type(sys)(name)
        package.__path__ = [folder]
        sys.modules[name] = package
    wanted = not sys.dont_write_bytecode
    # Until it is known whether there is room for compiled files.
    sys.dont_write_bytecode = True
    from _rdiag_agent import bytecode  # type: ignore[import-not-found]

    def probe() -> int:
        from _rdiag_agent.runner import main  # type: ignore[import-not-found]

        main(sys.argv[1:])
        return 0

    bytecode.run(probe, bundle, wanted=wanted)


if __name__ == "__main__":
    _main()
