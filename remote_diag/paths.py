"""Every path on this machine that rdiag reads or writes by default."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _first_existing(*candidates: Path) -> Path:
    return next((path for path in candidates if path.exists()), candidates[0])


def shipped_probes() -> Path:
    """Return the folder of the probes that come with rdiag: in the wheel, or beside the package in a checkout."""
    return _first_existing(_PACKAGE / "_shipped" / "probes", _PACKAGE.parent / "probes")


def user_probes() -> Path:
    """Return ``./probes``, where users keep their own."""
    return Path("probes")


def agent_source() -> Path:
    """Return the folder of the agent package, as it is sent to hosts."""
    return _PACKAGE / "agent"


def entry_script() -> Path:
    """Return the shell script that enters a host's environment."""
    return _PACKAGE / "enter.sh"


def install_script() -> Path:
    """Return the shell script that unpacks a bundle on a host."""
    return _PACKAGE / "install.sh"


def survey_script() -> Path:
    """Return the shell script that looks at a host for ``rdiag check``."""
    return _PACKAGE / "host_survey.sh"


def templates() -> Path:
    """Return the folder of the files that ``rdiag new-probe`` starts from."""
    return _PACKAGE / "templates"


def config_dir() -> Path:
    """Return the user's configuration folder for rdiag."""
    import platformdirs

    return Path(platformdirs.user_config_dir("rdiag"))


def user_inventory() -> Path:
    """Return the inventory in the user's configuration folder."""
    return config_dir() / "hosts.yaml"


def working_inventory() -> Path:
    """Return ``./hosts.yaml``."""
    return Path("hosts.yaml")


def shipped_inventory() -> Path:
    """Return the sample inventory that comes with rdiag."""
    return _first_existing(_PACKAGE / "_shipped" / "hosts.yaml", _PACKAGE.parent / "hosts.yaml")


def own_known_hosts() -> Path:
    """Return the file in which ``rdiag trust`` records host keys."""
    return config_dir() / "known_hosts"


def cache_dir() -> Path:
    """Return the user's cache folder for rdiag."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("rdiag"))


def state_dir() -> Path:
    """Return the user's state folder for rdiag."""
    import platformdirs

    return Path(platformdirs.user_state_dir("rdiag"))


def baselines() -> Path:
    """Return the folder of what hosts said when they were well."""
    import platformdirs

    return Path(platformdirs.user_data_dir("rdiag")) / "baselines"


def crash_reports() -> Path:
    """Return the folder where tracebacks of internal errors are kept."""
    return state_dir() / "crashes"
