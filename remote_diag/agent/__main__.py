"""Where ``python -E -s -S <bundle>/agent/__main__.py <entry nonce>`` starts.

This one file also parses on Python 2.7, so that a host whose Python is too old can say so in a frame.
"""

import os
import sys


def _say_too_old(nonce):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - annotations do not parse on 2.7
    import json
    import zlib

    version = "%d.%d.%d" % sys.version_info[:3]
    payload = json.dumps({"python": version, "executable": sys.executable}).encode("ascii")
    checksum = zlib.crc32(payload) & 0xFFFFFFFF
    header = "RDIAG1 %s 0 python-too-old %d %08x\n" % (nonce, len(payload), checksum)
    os.write(1, header.encode("ascii") + payload + b"\n")


def _main():  # type: ignore[no-untyped-def]  # noqa: ANN202
    nonce = sys.argv[1] if len(sys.argv) == 2 else ""
    if len(nonce) != 32 or nonce.strip("0123456789abcdef"):
        sys.stderr.write("usage: python -E -s -S <bundle>/agent/__main__.py <entry nonce>; rdiag starts this by itself\n")
        return 2
    if sys.version_info < (3, 8):
        _say_too_old(nonce)
        return 0
    here = os.path.dirname(os.path.abspath(__file__))
    bundle = os.path.dirname(here)
    # Python puts the script's folder first: its modules must not stand for others of the same name.
    sys.path[:] = [bundle] + [entry for entry in sys.path if entry and os.path.abspath(entry) != here]
    # Until it is known whether there is room for compiled files.
    sys.dont_write_bytecode = True
    from agent import bytecode  # type: ignore[import-not-found]

    def serve():  # type: ignore[no-untyped-def]  # noqa: ANN202
        from agent.main import main  # type: ignore[import-not-found]

        return main(nonce, bundle)

    return bytecode.run(serve, bundle)


if __name__ == "__main__":
    sys.exit(_main())  # type: ignore[no-untyped-call]
