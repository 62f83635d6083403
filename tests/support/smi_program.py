"""The program that stands in for ``nvidia-smi``: it answers from ``state.json`` beside it. Standard library, no site."""

from __future__ import annotations

PROGRAM = '''\
import fcntl, json, os, signal, sys, time
here = os.path.dirname(os.path.abspath(__file__))
arguments = sys.argv[1:]
with open(os.path.join(here, "calls"), "a") as calls:
    fcntl.flock(calls, fcntl.LOCK_EX)
    calls.write(json.dumps([os.getpid(), time.monotonic(), arguments]) + "\\n")
state = json.load(open(os.path.join(here, "state.json")))
if state["hang"] is not None and any(word in " ".join(arguments) for word in state["hang"]["when"]):
    if state["hang"]["freezer"]:
        open(os.path.join(state["hang"]["freezer"], "cgroup.procs"), "w").write(str(os.getpid()))
    elif state["hang"]["stop"]:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)
for beginning, text, status in state["answers"]:
    if arguments[: len(beginning)] == beginning:
        sys.stdout.write(text)
        sys.exit(status)

def value_of(gpu, field):
    return gpu.get(state["aliases"].get(field, field), "[N/A]")

def option(name, short=None):
    for place, word in enumerate(arguments):
        if word.startswith(name + "="):
            return word[len(name) + 1:]
        if word in (name, short):
            return arguments[place + 1] if place + 1 < len(arguments) else ""
    return None

def chosen():
    wanted = option("--id", "-i")
    if wanted is None:
        return state["gpus"]
    found = [gpu for gpu in state["gpus"]
             if wanted.lower() in (gpu["index"], gpu["uuid"].lower(), gpu["pci.bus_id"].lower(), gpu["pci.bus_id"].lower()[4:])]
    if not found:
        print("No devices were found")
        sys.exit(6)
    return found

def rows(names, table, known):
    form = (option("--format") or "").split(",")
    for name in names:
        if name not in known and name not in state["aliases"]:
            print('Field "%s" is not a valid field to query.' % name)
            print()
            sys.exit(2)
    if "noheader" not in form:
        print(", ".join(names))
    for row in table:
        if "error" in row:
            print(row["error"])
            continue
        cells = [value_of(row, name) for name in names]
        if "nounits" in form:
            cells = [cell.rsplit(" ", 1)[0] if cell.rsplit(" ", 1)[-1] in ("MiB", "W", "MHz", "%", "us", "KB/s") else cell
                     for cell in cells]
        print(", ".join(cells))

status = state["status"]
if "--help-query-gpu" in arguments:
    print('List of valid properties to query for the switch "--query-gpu":\\n')
    for field in state["fields"]:
        names = [field] + [alias for alias, of in state["aliases"].items() if of == field]
        print(" or ".join('"%s"' % name for name in names))
        print("What it says.\\n")
elif option("--query-gpu") is not None:
    gpus = chosen()
    table = []
    for gpu in gpus:
        if gpu["index"] in state["lost"]:
            table.append({"error": state["lost"][gpu["index"]]})
            status = status or (15 if len(gpus) == 1 else 0)
            if len(gpus) == 1:
                continue
            table.append({name: "[Unknown Error]" for name in state["fields"]})
        else:
            table.append(gpu)
    rows(option("--query-gpu").split(","), table, state["fields"])
elif option("--query-compute-apps") is not None:
    names = ["timestamp", "gpu_name", "gpu_bus_id", "gpu_serial", "gpu_uuid", "pid", "process_name", "used_gpu_memory"]
    rows(option("--query-compute-apps").split(","), state["apps"], names)
elif "-x" in arguments or "--xml-format" in arguments:
    sys.stdout.write(state["xml"])
elif arguments[:2] == ["nvlink", "-s"]:
    for gpu in chosen():
        links = state["nvlinks"].get(gpu["index"], [])
        if links and gpu["index"] in state["lost"]:
            print(state["lost"][gpu["index"]])
        elif links:
            print("GPU %s: %s (UUID: %s)" % (gpu["index"], gpu["name"], gpu["uuid"]))
            if any(links):
                for number, works in enumerate(links):
                    print("\\t Link %d: %s" % (number, "26.562 GB/s" if works else "<inactive>"))
            else:
                print("NVML: Unable to retrieve NVLink information as all links are inActive")
elif arguments[:1] == ["topo"]:
    letter = (option("-p2p", "--p2pstatus") or "").lower()
    if "-i" in arguments or "--id" in arguments:
        print('Option "-i" is not recognized. Please run nvidia-smi topo -h.')
        status = 1
    elif state["lost"]:
        # It asks every card, and one that does not answer costs the whole matrix.
        print("\\n".join(state["lost"].values()))
        print("Failed to run topology matrix: Unknown Error")
        status = 255
    elif "-m" in arguments or "--matrix" in arguments:
        sys.stdout.write(state["topo"]["m"])
    elif letter in state["topo"]["p2p"]:
        sys.stdout.write(state["topo"]["p2p"][letter])
    else:
        print("Invalid combination of input arguments. Please run 'nvidia-smi topo -h' for help.\\n")
        status = 1
elif "-L" in arguments or "--list-gpus" in arguments:
    for gpu in state["gpus"]:
        print("GPU %s: %s (UUID: %s)" % (gpu["index"], gpu["name"], gpu["uuid"]))
elif "--version" in arguments:
    driver = state["gpus"][0]["driver_version"] if state["gpus"] else "590.48.01"
    print("NVIDIA-SMI version  : %s\\nNVML version        : %s\\nDRIVER version      : %s\\nCUDA Version        : 13.1"
          % (driver, driver.rsplit(".", 1)[0], driver))
elif arguments:
    print("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\\n")
    status = 1
sys.exit(status)
'''
