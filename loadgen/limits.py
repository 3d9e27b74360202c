"""Limits of this machine that would look like a failing server: checked, and raised, before the first request."""

from __future__ import annotations

from pathlib import Path

from loadgen.options import UsageError

_OWN_DESCRIPTORS = 48  # event loop, files, libraries, standard streams


def ensure_descriptors(connections: int) -> None:
    """Raise the soft limit of open files to what `connections` need. UsageError when the hard limit is below."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    need = connections + _OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise UsageError(
            f"{connections} connections need {need} open files, but the limit is {hard}: "
            f"raise it (ulimit -n {need}), lower --concurrency, or use --workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def ensure_ports(connections: int) -> None:
    """UsageError when one client address has fewer local ports than `connections`."""
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return
    if connections > high - low:
        raise UsageError(
            f"{connections} connections need as many local ports, but this machine offers {high - low} "
            f"({low} to {high}): widen net.ipv4.ip_local_port_range, or lower --concurrency"
        )
